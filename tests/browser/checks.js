// What the tests ask of a page in the browser; each function returns a list of complaints, empty if all is well.
window.checks = (() => {
  const shown = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const named = (element) => `${element.nodeName.toLowerCase()}${element.id ? `#${element.id}` : ""}` +
    `${element.classList.length ? `.${[...element.classList].join(".")}` : ""} "${element.textContent.trim().slice(0, 40)}"`;

  // Any CSS color as [red, green, blue, alpha], 0 to 255 and 0 to 1.
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = color;
      canvas.fillRect(0, 0, 1, 1);
      const [red, green, blue, alpha] = canvas.getImageData(0, 0, 1, 1).data;
      known.set(color, [red, green, blue, alpha / 255]);
    }
    return known.get(color);
  };
  const over = (top, below) => [0, 1, 2].map((part) => top[part] * top[3] + below[part] * (1 - top[3])).concat(1);

  const background = (element) => {
    const layers = [];
    for (let one = element; one; one = one.parentElement) {
      layers.push(rgba(getComputedStyle(one).backgroundColor));
      if (layers.at(-1)[3] === 1) break;
    }
    return layers.reduceRight((below, top) => over(top, below), [255, 255, 255, 1]);
  };

  // WCAG 2.2
  const luminance = (color) => {
    const [red, green, blue] = color.slice(0, 3).map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const ratio = (one, other) => {
    const [low, high] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };

  const texts = () => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    const found = new Set();
    while (walker.nextNode()) {
      const parent = walker.currentNode.parentElement;
      if (walker.currentNode.nodeValue.trim() && shown(parent) && !parent.closest("title, desc, script, style")) {
        found.add(parent);
      }
    }
    return [...found];
  };

  return {
    texts: () => texts().length,
    luminance: () => luminance(background(document.body)),
    contrast: (least) => texts().flatMap((element) => {
      const style = getComputedStyle(element);
      const drawn = element instanceof SVGElement;
      const below = background(element);
      const ink = over(rgba(drawn ? style.fill : style.color), below);
      const found = ratio(ink, below);
      return found < least ? [`${found.toFixed(2)}: ${named(element)}`] : [];
    }),
    // What is wider than the window and not in a box that scrolls by itself.
    wide: () => {
      const scrolls = (element) => ["auto", "scroll", "hidden"].includes(getComputedStyle(element).overflowX);
      const boxed = (element) => {
        for (let one = element.parentElement; one && one !== document.body; one = one.parentElement) {
          if (scrolls(one)) return true;
        }
        return false;
      };
      const page = document.scrollingElement;
      const complaints = page.scrollWidth > window.innerWidth ? [`the page is ${page.scrollWidth} wide`] : [];
      for (const element of document.body.querySelectorAll("*")) {
        const { left, right, width } = element.getBoundingClientRect();
        if (width && right > window.innerWidth + 0.5 && left > -999 && shown(element) && !boxed(element)) {
          complaints.push(`${Math.round(right)}: ${named(element)}`);
        }
      }
      return complaints;
    },
    scrolling: () => [...document.querySelectorAll(".scroll")].filter((one) => one.scrollWidth > one.clientWidth).length,
    // Mark what a keyboard must reach, and what it looks like without the focus.
    mark: () => {
      const look = (style) => [style.outlineStyle, style.outlineWidth, style.outlineColor, style.boxShadow].join();
      const all = [...document.querySelectorAll("a[href], button, input:not([type=hidden]), summary, [tabindex='0']")];
      window.unreached = new Map(all.filter(shown).map((element) => [element, look(getComputedStyle(element))]));
      window.unseen = [];
      document.addEventListener("focusin", ({ target }) => {
        if (!window.unreached.has(target)) return;
        const style = getComputedStyle(target);
        const outlined = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
        const { width, height } = target.getBoundingClientRect();
        if (!outlined || look(style) === window.unreached.get(target) || !width || !height) {
          window.unseen.push(named(target));
        }
        window.unreached.delete(target);
      });
      return window.unreached.size;
    },
    unreached: () => [...window.unreached.keys()].map(named),
    unseen: () => window.unseen,
    // A script in the page, as an attacker would place it.
    inject: () => {
      const script = document.createElement("script");
      script.textContent = "window.injected = 2";
      document.body.append(script);
      return window.injected ?? null;
    },
  };
})();
