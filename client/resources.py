"""What the clients of one process share: images and splits, the network, the processor and how it computes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from fedtta.data import DATASETS, Federation, Images, load, load_natural
from fedtta.messages.arrays import digest
from fedtta.models import Preprocessing, TwoHead, build, normalization, without_weights
from fedtta.models.libraries import IMAGENET, per_channel
from fedtta.models.memory import take_share
from fedtta.settings import Scalar, Settings, SettingsError, assignments, from_config, words


@dataclass(frozen=True, eq=False)
class RunData:
    """All images of a run that divides one data set.

    Parameters
    ----------
    federation : Federation
    natural : Images or None
        Naturally shifted images (CIFAR-10.1), if they are at hand.
    """

    federation: Federation
    natural: Images | None

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all images, with their labels, domains and names."""
        arrays = {}
        for part, images in (("divided", self.federation.images), ("natural", self.natural)):
            if images is not None:
                names = repr((images.name, images.classes, images.domains)).encode()
                arrays[f"{part} names"] = np.frombuffer(names, np.uint8)
                arrays |= {f"{part} pixels": images.pixels[:], f"{part} labels": images.labels}
                arrays |= {} if images.domain is None else {f"{part} domain": images.domain}
        return digest(arrays)


#: Images that this process was given, by the settings that decide them.
_GIVEN: dict[tuple[tuple[str, Scalar], ...], RunData] = {}


def give(settings: Settings, data: RunData) -> None:
    """Let all clients of this process use these images in place of files."""
    _GIVEN[tuple(settings.select("data").items())] = data


def data_of(settings: Settings) -> RunData:
    """Return all images of a run that divides one data set; raises as `federation_of` and `natural_of`."""
    return RunData(federation_of(settings), natural_of(settings))


def natural_of(settings: Settings) -> Images | None:
    """Return the natural shift of a run's data set; None if there is none or it is not at hand.

    Raises
    ------
    ValueError, OSError
        As `fedtta.data.load_natural`.
    """
    if given := _GIVEN.get(tuple(settings.select("data").items())):
        return given.natural
    options = words(settings.dataset_options, "dataset-options")
    chosen: Any = options.get("natural", "")
    return load_natural(
        settings.dataset, settings.data_dir or None, settings.image_size, settings.channels, natural=chosen
    )


def federation_of(settings: Settings) -> Federation:
    """Return images and splits of all clients; the same settings give the same splits in every process.

    Raises
    ------
    SettingsError
        Another preprocessing than a data set's is asked for.
    ValueError, OSError
        As `fedtta.data.load` and `Federation.create`.
    """
    plain = Settings().select("preprocessing")
    for key, value in settings.select("preprocessing").items():
        if key not in ("image-size", "channels") and value != plain[key]:
            raise SettingsError(
                f"{key} = {value!r}: a divided data set has {plain[key]!r}; allowed for devices' own data"
            )
    if given := _GIVEN.get(tuple(settings.select("data").items())):
        return given.federation
    return _federation(tuple(settings.select("data", "source").items()))


def network_spec(images: Images, settings: Settings) -> dict[str, Any]:
    """Return the arguments of `fedtta.models.build`; the seed of initial weights only if `model-options` has one."""
    channels = images.shape[0]
    mean, std = normalization_of(settings, channels)
    return {
        "name": settings.model,
        "num_classes": len(images.classes),
        "in_channels": channels,
        "image_size": settings.image_size,
        "mean": mean,
        "std": std,
        "preprocessing": replace(preprocessing_of(settings), channels=channels).to_dict(),
        "classes": list(images.classes),
        **assignments(settings.model_options, "model-options"),
    }


def preprocessing_of(settings: Settings) -> Preprocessing:
    """Return the images' preprocessing.

    Raises
    ------
    SettingsError
        `window` is not of the form low,high.
    """
    values = {key.replace("-", "_"): value for key, value in settings.select("preprocessing").items()}
    try:
        return Preprocessing.from_dict(values)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def normalization_of(settings: Settings, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of the images, each with one number per channel.

    Raises
    ------
    SettingsError
        `normalization` is neither a known word nor of the form mean,...;std,...
    """
    text = settings.normalization
    if text == "auto":
        options = assignments(settings.model_options, "model-options")
        pretrained = normalization(settings.model, options, channels)
        return pretrained or DATASETS[settings.dataset].normalisation(channels)
    if text == "half":
        return (0.5,) * channels, (0.5,) * channels
    if text == "imagenet":
        mean, std = IMAGENET
        return per_channel(mean, channels), per_channel(std, channels)
    try:
        mean, std = (tuple(float(word) for word in part.split(",")) for part in text.split(";"))
    except ValueError:
        mean, std = (), ()
    mean, std = per_channel(mean, channels), per_channel(std, channels)
    if not (len(mean) == len(std) == channels and all(map(math.isfinite, (*mean, *std))) and min(std) > 0):
        allowed = "auto, half, imagenet, or 'mean,...;std,...' with a number for each channel, std positive"
        raise SettingsError(f"normalization = {text!r}: allowed are {allowed}")
    return mean, std


def resolve_device(name: str) -> torch.device:
    """Turn the setting `device` into a torch device.

    Raises
    ------
    SettingsError
        A GPU is asked for by name and is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise SettingsError(missing_gpu(name, torch.cuda.device_count()))
    return device


def missing_gpu(name: str, count: int) -> str:
    """Return what is wrong with the setting `device` where a process sees `count` GPUs, and what hides the others."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    return (
        f"device = {name!r}: this process sees {count} GPUs"
        + ("" if mask is None else f" (CUDA_VISIBLE_DEVICES = {mask!r})")
        + "; allowed are auto, cpu"
        + "".join(f", cuda:{i}" for i in range(count))
    )


def set_up_torch(device: torch.device, deterministic: bool = False, share: float = 1.0) -> None:
    """Set how this process computes, before it does.

    One torch thread: equal bits with 1 and 2 workers need it, since Ray sets the number from a client's CPUs.

    Parameters
    ----------
    device : torch.device
    deterministic : bool
        On a GPU: the same bits in every run. An operation that has no deterministic algorithm there raises a
        RuntimeError that names it. Without it, torch's switches are as they were before.
    share : float
        This process's share of the GPU, above 0.
    """
    torch.set_num_threads(1)
    if device.type == "cpu":
        return
    # Read once, at the first matrix product; an agent has predicted by the time a run asks for equal bits.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    take_share(share)
    _set_switches(deterministic)


def has_bfloat16(device: torch.device) -> bool:
    """Return whether a processor or GPU computes in bfloat16; in software that is several times slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # What torch itself asks; without oneDNN it has no fast kernels for it.
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Switches(NamedTuple):
    """What decides the bits of a GPU in torch, by names that all its versions since 2.7 read and write."""

    debug_mode: int  # 2: deterministic algorithms; `use_deterministic_algorithms` would import torch's compiler
    cudnn_deterministic: bool
    cudnn_benchmark: bool
    cudnn_tf32: bool
    matmul_tf32: bool

    @classmethod
    def now(cls) -> Switches:
        """Return how they are set."""
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        mode = torch.get_deterministic_debug_mode()
        return cls(mode, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32)

    def set(self) -> None:
        """Set them."""
        torch.set_deterministic_debug_mode(self.debug_mode)
        torch.backends.cudnn.deterministic = self.cudnn_deterministic
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        torch.backends.cudnn.allow_tf32 = self.cudnn_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.matmul_tf32


DETERMINISTIC = Switches(2, cudnn_deterministic=True, cudnn_benchmark=False, cudnn_tf32=False, matmul_tf32=False)
_before: list[Switches] = []  # what is set again once equal bits are no longer asked for


def _set_switches(deterministic: bool) -> None:
    """Set the switches for equal bits, or as they were before that."""
    if deterministic and not _before:
        _before.append(Switches.now())
        DETERMINISTIC.set()
    elif not deterministic and _before:
        _before.pop().set()


@lru_cache(maxsize=2)
def _federation(chosen: tuple[tuple[str, Scalar], ...]) -> Federation:
    """Load the images and divide them among the clients."""
    settings = from_config(dict(chosen))
    options: dict[str, Any] = dict(words(settings.dataset_options, "dataset-options"))
    images = load(
        settings.dataset,
        root=settings.data_dir or None,
        image_size=settings.image_size,
        channels=settings.channels,
        download=settings.download,
        fraction=settings.fraction,
        seed=settings.seed,
        **options,
    )
    return Federation.create(
        images,
        settings.clients,
        scheme=settings.partition,
        alpha=settings.alpha,
        seed=settings.seed,
        step_ratio=settings.step_ratio,
        target_fraction=settings.target_fraction,
        domains=settings.domains,
        target_domain=settings.target_domain,
        unseen_domain=settings.unseen_domain,
        resample_splits=settings.split == "published",
        train_part=settings.train_part,
        test_part=settings.test_part,
    )


def shared_network(spec: Mapping[str, Any], device: str) -> TwoHead:
    """Return the network that this process uses for all clients; its weights are loaded for each request.

    Parameters
    ----------
    spec : mapping
        As `network_spec` returns it.
    device : str
        The setting.
    """
    return _network(json.dumps(spec), device)


@lru_cache(maxsize=2)
def _network(spec: str, device: str) -> TwoHead:
    network = build(**{"seed": 0, **without_weights(json.loads(spec))})  # the server sends all values
    # convolutions run faster in this memory format, on CPUs as on GPUs; values are the same
    return network.to(resolve_device(device)).to(memory_format=torch.channels_last)
