"""For tests: platforms, models and engines that are made up. The gate and the matrix are functions of data; here it is made.

A vendor can use it to see how the gate treats a platform before there is one.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fitment.conditions import ALWAYS, Condition
from fitment.description import ModelDescription
from fitment.facts import Facts, Value
from fitment.formats.base import TensorInfo
from fitment.hardware import Device, Hardware, KVLayout, Listing
from fitment.hookspecs import EngineInfo, hookimpl
from fitment.kernels import Kernel, Speed
from fitment.ops import OPS, WEIGHTED
from fitment.plugins import ENGINE_GROUP, Registry, load
from fitment.weights.specs import DenseSpec, WeightSpec
from fitment_matrix.gate import Request

if TYPE_CHECKING:
    import pytest

_ORDER = ("block", "slot", "head", "dim")
_PREFIX = "made_up_plugin_"

MODEL = ModelDescription("llama", num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_size=16,
                         vocab_size=320, max_position=512, rotary_size=16, name="tiny")
"""A tiny Llama."""

ENGINE = EngineInfo("made-up", "1.2", ("llama",), ("continuous_batching", "graph_capture", "kv_cache.bf16", "sampling"),
                    ("linear",))
"""An engine that has little."""

_LAYER = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64), "self_attn.o_proj": (64, 64),
          "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128), "input_layernorm": (64,),
          "post_attention_layernorm": (64,)}


def shapes(model: ModelDescription = MODEL) -> dict[str, tuple[int, ...]]:
    """The tiny model's tensors by name."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (320, 64)}
    for layer in range(model.num_layers):
        found.update((f"model.layers.{layer}.{name}.weight", shape) for name, shape in _LAYER.items())
    found["model.norm.weight"] = (64,)
    return found if model.tie_embeddings else {**found, "lm_head.weight": (320, 64)}


def make_request(spec: WeightSpec | None = None, model: ModelDescription = MODEL, **options: Any) -> Request:
    """A request for the tiny model with matrices of ``spec`` (default bf16) and vectors of fp32."""
    matrix = TensorInfo("", (), "BF16" if spec is None else "Q", spec or DenseSpec("bf16"), 1)
    vector = TensorInfo("", (), "F32", DenseSpec("fp32"), 1)
    kinds = {name: (shape, matrix if len(shape) == 2 else vector) for name, shape in shapes(model).items()}
    tensors = {name: TensorInfo(name, shape, kind.encoding, kind.spec, kind.nbytes) for name, (shape, kind) in kinds.items()}
    return Request(model, tensors, "safetensors", **options)


def write_model(folder: Path, dtype: str = "BF16") -> Path:
    """The tiny model as a Hugging Face directory, all zeros; ``dtype`` is safetensors' word for a type of two bytes."""
    folder.mkdir(parents=True)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
              "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 320,
              "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes().items():
        end = offset + 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header[name], offset = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}, end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return folder


def all_kernels(name: str, speed: Speed = Speed.PORTABLE, condition: Condition = ALWAYS,
                without: Iterable[str] = ()) -> list[Kernel]:
    """A kernel ``NAME.OP`` for each op; those that take weights pack them."""
    return [Kernel(op, f"{name}.{op}", f"made_up_kernels:{op}", condition, speed,
                   prepare="made_up_kernels:pack" if op in WEIGHTED else None) for op in OPS if op not in without]


def plugin(name: str, kernels: Iterable[Kernel], hardware: Mapping[str, Mapping[str, Value]] | None = None, *,
           devices: Mapping[str, Mapping[str, Value]] | None = None, layout: KVLayout | None = None,
           abilities: Mapping[str, Condition] | None = None, defaults: Mapping[str, tuple[str, ...]] | None = None) -> ModuleType:
    """A platform's plugin as an importable module; ``hardware`` and ``devices`` have facts by name and id."""
    module = ModuleType(_PREFIX + name)
    listing = Listing(tuple(Device(id_, name, "", f"the {id_}", Facts(facts)) for id_, facts in (devices or {}).items()))
    returned: dict[str, Any] = {
        "fitment_hardware": [Hardware(part, name, f"a {part}", Facts(facts)) for part, facts in (hardware or {}).items()],
        "fitment_devices": listing,
        "fitment_kernels": list(kernels),
        "fitment_kv_layout": layout or KVLayout(name, 16, _ORDER, _ORDER, ("fp32", "bf16", "int8")),
        "fitment_abilities": dict(abilities or {}),
        "fitment_defaults": dict(defaults or {}),
        "fitment_graph_capture": "made_up_kernels:Capture",
    }
    for hook, value in returned.items():
        setattr(module, hook, _hook(hook, value))
    return _importable(module)


def _hook(name: str, value: Any) -> Callable[[], Any]:
    def function() -> Any:
        return value

    function.__name__ = name
    return hookimpl(function)


def _importable(module: ModuleType) -> ModuleType:
    module.FITMENT_API = ">=1.0,<2"  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


def register(*modules: ModuleType) -> Registry:
    """A registry with these plugins, each of which loads, beside those that are installed."""
    registry = load({module.__name__.removeprefix(_PREFIX): module.__name__ for module in modules})
    assert not registry.broken, registry.broken
    return registry


def null_platform() -> Registry:
    """A registry with the null platform, beside those that are installed."""
    return load({"null": "fitment.null.plugin"})


def isolate(monkeypatch: pytest.MonkeyPatch, engine: EngineInfo | None = None, **plugins: ModuleType | str) -> None:
    """For the rest of a test nothing is installed but ``engine`` and ``plugins``, platforms by name."""
    points: dict[str, tuple[EntryPoint, ...]] = {}
    if engine is not None:
        module = _importable(ModuleType(f"{_PREFIX}engine"))
        module.fitment_engine = _hook("fitment_engine", engine)  # type: ignore[attr-defined]
        points[ENGINE_GROUP] = (EntryPoint(engine.name, module.__name__, ENGINE_GROUP),)
    monkeypatch.setattr("fitment.plugins.entry_points", lambda group: points.get(group, ()))
    monkeypatch.setattr("fitment_matrix.cli._common.entry_points", lambda group: points.get(group, ()))
    named = {name: module if isinstance(module, str) else module.__name__ for name, module in plugins.items()}
    monkeypatch.setenv("FITMENT_PLUGINS", ",".join(f"{name}={module}" for name, module in named.items()))
