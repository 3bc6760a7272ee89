"""Schemes of `--quantization`: what transformers can quantise with while it loads, and the library each takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import transformers

from lade.errors import ConfigError


@dataclass(frozen=True)
class Scheme:
    """One way to quantise.

    Attributes:
        package: what pip calls the library that does it.
        module: what Python calls it.
        config: makes transformers' config for it; the library is imported only then.
    """

    package: str
    module: str
    config: Callable[[], Any]

    @property
    def installed(self) -> bool:
        """Whether the library is there."""
        try:
            return find_spec(self.module) is not None
        except ModuleNotFoundError:  # of a package that the module would be in
            return False


def _torchao(name: str, **fields: Any) -> Scheme:
    def config() -> Any:
        return transformers.TorchAoConfig(getattr(import_module("torchao.quantization"), name)(**fields))

    return Scheme("torchao", "torchao", config)


def _bitsandbytes(**fields: Any) -> Scheme:
    return Scheme("bitsandbytes", "bitsandbytes", lambda: transformers.BitsAndBytesConfig(**fields))


def _quanto(weights: str) -> Scheme:
    return Scheme("optimum-quanto", "optimum.quanto", lambda: transformers.QuantoConfig(weights=weights))


SCHEMES = {
    "bnb-4bit": _bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
    "bnb-8bit": _bitsandbytes(load_in_8bit=True),
    "quanto-int4": _quanto("int4"),
    "quanto-int8": _quanto("int8"),
    "torchao-float8": _torchao("Float8WeightOnlyConfig"),
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
}


def quantization_config(name: str) -> Any:
    """What `from_pretrained` takes as `quantization_config` for a scheme.

    Raises:
        ConfigError: there is no such scheme, or its library is not installed or cannot be imported.
    """
    scheme = SCHEMES.get(name)
    if scheme is None:
        here = ", ".join(each for each, scheme in SCHEMES.items() if scheme.installed) or "none"
        raise ConfigError("quantization", name, f"give one of {', '.join(SCHEMES)}; installed here: {here}")
    remedy = f"it takes {scheme.package}: run  pip install accelerate {scheme.package}"
    if not scheme.installed or find_spec("accelerate") is None:
        raise ConfigError("quantization", name, remedy)
    try:
        return scheme.config()
    except ImportError as problem:
        raise ConfigError("quantization", name, f"{problem}; {remedy}") from problem
