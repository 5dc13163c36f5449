"""The network that a run starts from: the arguments that build it, its first weights, and checks of a model file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedtta.messages.arrays import Arrays
from fedtta.models import Preprocessing, TwoHead, build, load_model, save_model
from fedtta.models.libraries import per_channel
from fedtta.models.weights import stated_spec
from fedtta.server.members import FederationInfo
from fedtta.settings import Settings, SettingsError, assignments


def model_spec(settings: Settings, info: FederationInfo) -> dict[str, Any]:
    """Return the arguments that build the run's network (`fedtta.models.build`); model files have them, too.

    Raises
    ------
    SettingsError
        The images' preprocessing is not possible.
    """
    values = {key.replace("-", "_"): value for key, value in settings.select("preprocessing").items()}
    try:
        preprocessing = Preprocessing.from_dict({**values, "channels": info.channels})
    except ValueError as error:
        raise SettingsError(str(error)) from error
    return {
        "name": settings.model,
        "num_classes": len(info.classes),
        "in_channels": info.channels,
        "image_size": settings.image_size,
        "mean": info.mean,
        "std": info.std,
        "preprocessing": preprocessing.to_dict(),
        "classes": info.classes,
        **assignments(settings.model_options, "model-options"),
    }


def with_stated_normalization(settings: Settings) -> Settings:
    """Return settings whose `normalization = auto` is that of the model file `init` or `pretrained`, if it says one.

    Raises
    ------
    SettingsError
        The file cannot be read.
    """
    pretrained = str(assignments(settings.model_options, "model-options").get("pretrained"))
    file = settings.init or (pretrained if pretrained.endswith(".safetensors") else "")
    if settings.normalization != "auto" or not file:
        return settings
    try:
        stated = stated_spec(file)
    except (ValueError, OSError) as error:
        name = f"init = {settings.init!r}" if settings.init else f"model = {settings.model!r}"
        raise SettingsError(f"{name}: {error}") from error
    if not {"mean", "std"} & set(stated):
        return settings
    return settings.replace(normalization=_normalization(stated, stated.get("in_channels", 3), repr))


def initial_model(settings: Settings, spec: dict[str, Any]) -> TwoHead:
    """Build the network that training starts from: random from the seed, pretrained, or the file `init`.

    Its `notes` say what images a model file was trained on, if the run's are others.

    Raises
    ------
    SettingsError
        An option does not fit, the file's network is another one, it was trained with another normalization, or it has
        the run's classes in another order.
    """
    try:
        model = build(**{"seed": settings.seed, **spec})
        if settings.init:
            other, stated = load_model(settings.init)
            _check_order(stated.get("classes"), spec["classes"])
            _check_normalization(settings, stated, spec)
            model.load_global_state(other.global_state())
            model.notes = _departures(f"init = {settings.init!r}", stated, spec)
        elif (file := str(spec.get("pretrained"))).endswith(".safetensors") and (stated := stated_spec(file)):
            model.notes += _departures(f"pretrained = {file!r}", stated, spec)
    except (ValueError, OSError) as error:
        name = f"init = {settings.init!r}" if settings.init else f"model = {settings.model!r}"
        raise SettingsError(f"{name}: {error}") from error
    return model


def save_trained(path: Path, model: TwoHead, arrays: Arrays, spec: dict[str, Any]) -> None:
    """Write the global model; the personal heads stay on the devices."""
    model.load_global_state({name: torch.tensor(value) for name, value in arrays.items()})
    save_model(path, model, spec)


def _check_order(stated: Sequence[str] | None, classes: Sequence[str]) -> None:
    """Raise ValueError if a file's classes are those of the run in another order, which its head does not know."""
    if stated is not None and list(stated) != list(classes) and set(stated) == set(classes):
        raise ValueError(f"its classes are {', '.join(stated)}; the run has the same in another order")


def _check_normalization(settings: Settings, stated: Mapping[str, Any], spec: Mapping[str, Any]) -> None:
    """Raise ValueError if a file says that its network was trained with another normalization than the run's."""
    there, here = (_normalization(one, spec["in_channels"]) for one in (stated, spec))
    if {"mean", "std"} & set(stated) and there != here:
        raise ValueError(
            f"it was trained with normalization = {there!r}, and the run has normalization = "
            f"{settings.normalization!r}, which is {here!r}; allowed are auto, for the file's own, and {there!r}"
        )


def _departures(file: str, stated: Mapping[str, Any], spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note on how the images that a model file was trained on were prepared, if not as those of the run."""
    there, here = _prepared(stated, spec["in_channels"]), _prepared(spec, spec["in_channels"])
    different = [key for key in here if there.get(key, here[key]) != here[key]]
    if not different:
        return ()
    return (f"{file} was trained with " + "; ".join(f"{one} = {there[one]!r}, not {here[one]!r}" for one in different),)


def _prepared(spec: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Return the settings that prepared the images of a network; the normalization for so many channels."""
    prepared = {key.replace("_", "-"): value for key, value in (spec.get("preprocessing") or {}).items()}
    return {"normalization": _normalization(spec, channels), **prepared}


def _normalization(spec: Mapping[str, Any], channels: int, text: Callable[[float], str] = "{:g}".format) -> str:
    """Return the setting `normalization` of a network, for so many channels."""
    constants = (spec.get(name, 0.5) for name in ("mean", "std"))
    numbers = ([one] if isinstance(one, int | float) else one for one in constants)
    return ";".join(",".join(text(number) for number in per_channel(one, channels)) for one in numbers)
