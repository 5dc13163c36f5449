// Keeps a page up to date: asks for the sections that have changed and changes only what differs in them, so that
// scroll positions, the focus, selected text and open parts stay as the reader left them.
"use strict";

(() => {
  const page = document.getElementById("page");
  const connection = document.getElementById("connection");
  if (!page || !page.dataset.have) return;

  const have = new Map(page.dataset.have.split(",").map((pair) => pair.split(".")));
  let seconds = Number(page.dataset.seconds) || 1;
  let ended = page.dataset.ended === "true";
  let failures = 0;
  let timer = 0;
  let asking = false;

  const say = (words, lost = false) => {
    if (connection.textContent !== words) connection.textContent = words;
    connection.classList.toggle("lost", lost);
  };

  const parsed = (html) => {
    const template = document.createElement("template");
    template.innerHTML = html;
    return template.content.firstElementChild;
  };

  const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE && node.id ? node.id : null);

  // Make a node equal to another one of the same name, with as few changes as possible.
  const morph = (node, wanted) => {
    if (node.isEqualNode(wanted)) return;
    if (node.nodeName === "svg") {
      node.replaceWith(wanted); // a plot has nothing to keep
      return;
    }
    if (node.nodeType !== Node.ELEMENT_NODE) {
      node.nodeValue = wanted.nodeValue;
      return;
    }
    const readers = node.nodeName === "DETAILS" ? ["open"] : []; // what the reader decides
    for (const { name } of [...node.attributes]) {
      if (!wanted.hasAttribute(name) && !readers.includes(name)) node.removeAttribute(name);
    }
    for (const { name, value } of wanted.attributes) {
      if (!readers.includes(name) && node.getAttribute(name) !== value) node.setAttribute(name, value);
    }
    morphChildren(node, [...wanted.childNodes]);
  };

  const morphChildren = (parent, wanted) => {
    let next = parent.firstChild;
    for (const child of wanted) {
      const key = keyOf(child);
      let match = next;
      if (key) {
        match = [...parent.children].find((one) => one.id === key) ?? null;
      } else if (!match || keyOf(match) || match.nodeName !== child.nodeName) {
        match = null;
      }
      if (match && match.nodeName === child.nodeName) {
        if (match !== next) parent.insertBefore(match, next);
        next = match.nextSibling;
        morph(match, child);
      } else {
        parent.insertBefore(child, next);
      }
    }
    while (next) {
      const after = next.nextSibling;
      next.remove();
      next = after;
    }
  };

  const show = ({ order, changed }) => {
    for (const name of [...have.keys()]) {
      if (!order.includes(name)) {
        document.getElementById(name)?.remove();
        have.delete(name);
      }
    }
    let before = null; // sections that are there stay where they are; new ones go after the one before them
    for (const name of order) {
      let section = document.getElementById(name);
      if (name in changed) {
        const wanted = parsed(changed[name].html);
        if (section) {
          morph(section, wanted);
        } else {
          section = wanted;
          page.insertBefore(section, before ? before.nextSibling : page.firstChild);
        }
        have.set(name, changed[name].digest);
      }
      before = section ?? before;
    }
  };

  const ask = async () => {
    clearTimeout(timer);
    if (asking) return;
    asking = true;
    const known = [...have].map((pair) => pair.join(".")).join(",");
    let wait = ended ? 10 : seconds;
    try {
      const answer = await fetch(`${location.pathname}?have=${encodeURIComponent(known)}`, {
        credentials: "same-origin",
        cache: "no-store",
        signal: AbortSignal.timeout(60000),
      });
      if (answer.status === 401) {
        location.reload(); // the login has expired
        return;
      }
      if (!answer.ok) throw new Error(`status ${answer.status}`);
      const update = await answer.json();
      show(update);
      document.title = update.title;
      ({ ended, seconds } = update);
      failures = 0;
      say(ended ? "The run has ended." : "Updating.");
      wait = ended ? 10 : seconds;
    } catch {
      failures += 1;
      if (!ended) say("Connection lost; trying again.", true);
      wait = Math.min(30, 2 ** failures);
    }
    asking = false;
    if (!document.hidden) timer = setTimeout(ask, 1000 * wait);
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) clearTimeout(timer);
    else ask();
  });
  say(ended ? "The run has ended." : "Updating.");
  timer = setTimeout(ask, 1000 * (ended ? 10 : seconds));
})();
