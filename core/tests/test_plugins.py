"""Plugins: found, checked, isolated. A broken one is a row that says what is wrong, and harms nobody."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from fitment import plugins
from fitment.errors import FitmentError
from fitment.plugins import ENGINE_GROUP, EXTRA_VARIABLE, PLATFORM_GROUP, Broken, Registry, load

NULL = "fitment.null.plugin"

GOOD = '''
from fitment.conditions import *
from fitment.facts import FactKey, Facts, Kind
from fitment.hardware import Device, Hardware, KVLayout, Listing
from fitment.hookspecs import EngineInfo, hookimpl
from fitment.kernels import Kernel

FITMENT_API = ">=1.0,<2"
ORDER = ("block", "slot", "head", "dim")

@hookimpl
def fitment_fact_keys():
    return [FactKey("acme.rows", "int", Kind.HARDWARE, "Rows.")]

@hookimpl
def fitment_hardware():
    return [Hardware("acme-1", "acme", "Acme 1", Facts({"arch": "a1", "acme.rows": 8}))]

@hookimpl
def fitment_devices():
    return Listing((Device("acme:0", "acme", "acme-1", "Acme 1", Facts({"arch": "a1"})),))

@hookimpl
def fitment_kernels():
    return [Kernel("linear", "acme.linear", "acme.kernels:linear", at_least("acme.rows", 4), prepare="acme.kernels:prepare")]

@hookimpl
def fitment_kv_layout():
    return KVLayout("acme", 16, ORDER, ORDER, ("bf16",))

@hookimpl
def fitment_abilities():
    return {"graph_capture": equals("arch", "a1")}

@hookimpl
def fitment_defaults():
    return {"dtype": ("bf16", "fp32")}

@hookimpl
def fitment_graph_capture():
    return "acme.graph:Capture"
'''

ENGINE = GOOD[: GOOD.index("ORDER =")] + '''
@hookimpl
def fitment_engine():
    return EngineInfo("toy", "1.2", ("llama",), ("logprobs",))
'''

NUMBERS = itertools.count()
Writer = Callable[..., str]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The installed entry points: what a test adds."""
    points: list[EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point for point in points if point.group == group])
    monkeypatch.delenv(EXTRA_VARIABLE, raising=False)
    return points


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    """Writes a plugin's module, the good one with replacements; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(*replacements: tuple[str, str], source: str = GOOD) -> str:
        for old, new in replacements:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
        name = f"plugin_sample_{next(NUMBERS)}"
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        importlib.invalidate_caches()
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def only_broken(registry: Registry) -> Broken:
    """The one row; the null platform beside it works."""
    assert "null" in registry.platforms
    assert registry.platforms["null"].listing.devices
    (row,) = registry.broken
    return row


def test_a_good_plugin(write: Writer) -> None:
    registry = load({"acme": write()})
    assert registry.broken == []
    platform = registry.platforms["acme"]
    assert (platform.distribution, platform.version, platform.api) == (EXTRA_VARIABLE, "", ">=1.0,<2")
    assert [kernel.name for kernel in platform.kernels] == ["acme.linear"]
    assert platform.graph_capture == "acme.graph:Capture"
    assert platform.defaults == {"dtype": ("bf16", "fp32")}
    assert list(registry.hardware) == ["acme-1"]
    assert [device.id for device in registry.devices] == ["acme:0"]
    assert registry.facts["acme.rows"].doc == "Rows."
    assert platform.listing is platform.listing  # asked for once


def test_optional_hooks_may_be_absent(write: Writer) -> None:
    source = GOOD
    for hook in ("fact_keys", "hardware", "abilities", "defaults", "graph_capture"):
        source = source.replace(f"@hookimpl\ndef fitment_{hook}", f"def unused_{hook}")
    registry = load({"acme": write(('at_least("acme.rows", 4)', "ALWAYS"), source=source)})
    assert registry.broken == []
    platform = registry.platforms["acme"]
    assert (platform.hardware, platform.abilities, platform.defaults, platform.graph_capture) == ((), {}, {}, None)


@pytest.mark.parametrize(("source", "problem"), [
    ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
    ("def broken(:", "SyntaxError: invalid syntax"),
    ("raise OSError('libacme.so.2: cannot open shared object file')", "OSError: libacme.so.2: cannot open shared object file"),
    ("import sys; sys.exit('acme needs a licence')", "SystemExit: acme needs a licence"),
    ("class Odd(BaseException): pass\nraise Odd", "Odd: no message"),
    ("from fitment.errors import FitmentError\nraise FitmentError('acme 1 is no longer made')", "acme 1 is no longer made"),
])
def test_a_module_that_cannot_be_imported(source: str, problem: str, write: Writer) -> None:
    row = only_broken(load({"acme": write(source=source), "null": NULL}))
    assert (row.name, row.distribution, row.stage) == ("acme", EXTRA_VARIABLE, "import")
    assert row.problem.startswith(problem)


def test_a_module_that_is_not_there() -> None:
    row = only_broken(load({"acme": "acme_fitment.plugin", "null": NULL}))
    assert (row.stage, row.problem) == ("import", "ModuleNotFoundError: No module named 'acme_fitment'")


@pytest.mark.parametrize(("stated", "problem"), [
    ("", "FITMENT_API is None; state the versions it was written for, such as '>=1.0,<2'"),
    ("FITMENT_API = 1.0", "FITMENT_API is 1.0; state the versions"),
    ("FITMENT_API = '1.0 and up'", "FITMENT_API = '1.0 and up' is not a version specifier such as '>=1.0,<2'"),
    ("FITMENT_API = '>=2,<3'", "built for API >=2,<3, this is 1.0; install a version of the plugin that fits"),
    ("FITMENT_API = '<1'", "built for API <1, this is 1.0; install a version of the plugin that fits"),
    ("FITMENT_API = '==1.1'", "built for API ==1.1, this is 1.0"),
])
def test_a_plugin_for_another_api(stated: str, problem: str, write: Writer) -> None:
    row = only_broken(load({"acme": write(('FITMENT_API = ">=1.0,<2"', stated)), "null": NULL}))
    assert row.stage == "api"
    assert row.problem.startswith(problem)


@pytest.mark.parametrize("stated", [">=1.0,<2", "==1.*", "~=1.0", ""])
def test_a_plugin_for_this_api(stated: str, write: Writer) -> None:
    registry = load({"acme": write(('">=1.0,<2"', repr(stated)))})
    assert registry.broken == []
    assert registry.platforms["acme"].api == stated


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("fitment_defaults", "fitment_default", "unknown hook 'fitment_default'"),
    ("def fitment_kernels():", "def fitment_kernels(arch):", "hook 'fitment_kernels'"),
    ("@hookimpl\ndef fitment_kernels", "def fitment_kernels", "fitment_kernels is missing; every platform implements it"),
    ("@hookimpl\ndef fitment_kv_layout", "def kv_layout", "fitment_kv_layout is missing; every plugin implements it"),
    ("@hookimpl\ndef fitment_devices", "def devices", "fitment_devices is missing; every platform implements it"),
])
def test_a_half_written_plugin(old: str, new: str, problem: str, write: Writer) -> None:
    row = only_broken(load({"acme": write((old, new)), "null": NULL}))
    assert row.stage == "hooks"
    assert problem in row.problem


WRONG = [
    ("fact_keys", "return None", "fitment_fact_keys returned None (NoneType), wanted an iterable of FactKey"),
    ("fact_keys", "return ['acme.rows']", "fitment_fact_keys returned 'acme.rows' (str), wanted FactKey"),
    ("fact_keys", "return 'acme.rows'", "fitment_fact_keys returned 'acme.rows' (str), wanted an iterable of FactKey"),
    ("hardware", "return {'acme-1': {}}", "fitment_hardware returned 'acme-1' (str), wanted Hardware"),
    ("kernels", "return 3", "fitment_kernels returned 3 (int), wanted an iterable of Kernel"),
    ("kernels", "return [Kernel]", "fitment_kernels returned <class 'fitment.kernels.Kernel'> (type), wanted Kernel"),
    ("kernels", "raise LookupError('no arch')", "LookupError: no arch"),
    ("kernels", "yield Kernel('linear', 'acme.linear', 'acme.kernels:linear')\n    raise LookupError('no arch')", "LookupError: no arch"),
    ("kernels", "return [Kernel('linear')]", "TypeError: Kernel.__init__() missing 2 required positional arguments"),
    ("kv_layout", "return ORDER", "fitment_kv_layout returned ('block', 'slot', 'head', 'dim') (tuple), wanted KVLayout"),
    ("kv_layout", "raise SystemExit", "SystemExit: no message"),
    ("abilities", "return ['graph_capture']", "fitment_abilities returned ['graph_capture'] (list), wanted dict"),
    ("defaults", "return [('dtype', ('fp32',))]", "fitment_defaults returned [('dtype', ('fp32',))] (list), wanted dict"),
    ("graph_capture", "return object", "fitment_graph_capture returned <class 'object'> (type), wanted str"),
]


@pytest.mark.parametrize(("hook", "body", "problem"), WRONG)
def test_a_hook_that_returns_something_else_or_fails(hook: str, body: str, problem: str, write: Writer) -> None:
    module = write((f"def fitment_{hook}():\n", f"def fitment_{hook}():\n    {body}\n"))
    row = only_broken(load({"acme": module, "null": NULL}))
    assert row.stage == f"fitment_{hook}"
    assert row.problem.startswith(problem)


DECLARATIONS = [
    ('Hardware("acme-1", "acme"', 'Hardware("acme-1", "other"', "hardware 'acme-1' says platform 'other', wanted 'acme'"),
    ('Hardware("acme-1"', 'Hardware("null"', "hardware 'null' is named by platform 'null' already"),
    ('return [Hardware(', 'return [Hardware("acme-1", "acme", "", Facts()), Hardware(',
     "hardware 'acme-1' is named by platform 'acme' already"),
    ('"acme.rows": 8', '"acme.row": 8', "hardware 'acme-1': fact 'acme.row' is not declared"),
    ('"acme.rows": 8', '"acme.rows": "8"', "hardware 'acme-1': fact 'acme.rows' = '8' has type str, wanted int"),
    ('Facts({"arch": "a1", "acme.rows": 8})', '7', "AttributeError: 'int' object has no attribute 'items'"),
    ('[Kernel("linear"', '[Kernel("lineal"', "kernel 'acme.linear': op 'lineal' has no contract; ops are embedding, linear,"),
    ('return [Kernel(', 'return [Kernel("linear", "acme.linear", "acme.kernels:old"), Kernel(', "kernel 'acme.linear' is registered twice"),
    ('"acme.kernels:linear"', '"acme.kernels.linear"', "kernel 'acme.linear': entry 'acme.kernels.linear' is not 'module:function'"),
    ('"acme.kernels:linear"', '"acme.kernels:linear:fast"', "entry 'acme.kernels:linear:fast' is not 'module:function'"),
    ('"acme.kernels:linear"', '"acme-kernels:linear"', "entry 'acme-kernels:linear' is not 'module:function'"),
    ('"acme.kernels:linear"', '":linear"', "entry ':linear' is not 'module:function'"),
    ('"acme.kernels:linear"', 'None', "AttributeError: 'NoneType' object has no attribute 'partition'"),
    ('prepare="acme.kernels:prepare"', 'prepare=""', "entry '' is not 'module:function'"),
    ('at_least("acme.rows", 4)', 'at_least("acme.columns", 4)',
     "kernel 'acme.linear': its condition looks at fact 'acme.columns', which nobody declared; declare a FactKey for it"),
    ('at_least("acme.rows", 4)', 'ALWAYS & (ALWAYS | at_least("arch", 4))',
     "kernel 'acme.linear': at_least does not apply to fact 'arch', which is a str"),
    ('at_least("acme.rows", 4)', 'has("arch", "a1")', "has does not apply to fact 'arch', which is a str"),
    ('at_least("acme.rows", 4)', 'multiple_of("memory_bandwidth", 4)', "multiple_of does not apply to fact 'memory_bandwidth', which is"),
    ('at_least("acme.rows", 4)', 'Test("acme.rows", "exactly", 4)', "exactly does not apply to fact 'acme.rows', which is a int"),
    ('at_least("acme.rows", 4)', 'at_least("acme.rows", "4")', "at_least compares fact 'acme.rows' with '4', which is no number"),
    ('at_least("acme.rows", 4)', 'version("arch", ">=1")', "version does not apply to fact 'arch', which is a str"),
    ('at_least("acme.rows", 4)', 'equals("torch", 2)', "2 can never be fact 'torch', which is a version"),
    ('at_least("acme.rows", 4)', 'equals("isa", "a")', "is_in does not apply to fact 'isa', which is a set"),
    ('at_least("acme.rows", 4)', 'is_in("head_size", ("64",))', "'64' can never be fact 'head_size', which is a int"),
    ('at_least("acme.rows", 4)', '"arch == a1"', "kernel 'acme.linear': condition 'arch == a1' is no Condition"),
    ('"acme", 16, ORDER', '"acme", 0, ORDER', "KV layout 'acme': block_size 0 is not positive"),
    ('"acme", 16, ORDER', '"acme", "16", ORDER', "TypeError: '<' not supported"),
    ('"acme", 16, ORDER', '"acme", 16, ORDER[1:]', "KV layout 'acme': order ('slot', 'head', 'dim') is no permutation of block, dim,"),
    ('"acme", 16, ORDER', '"acme", 16, (*ORDER, "dim")', "is no permutation of block, dim, head, slot"),
    ('ORDER, ("bf16",)', 'ORDER, ("half",)', "KV layout 'acme': dtype 'half' is none of fp32, fp16, bf16,"),
    ('"graph_capture": equals', '"graphs": equals', "ability 'graphs' is none of graph_capture, async_copy,"),
    ('equals("arch", "a1")', 'True', "ability 'graph_capture': condition True is no Condition"),
    ('equals("arch", "a1")', 'equals("acme.speed", 1)', "ability 'graph_capture': its condition looks at fact 'acme.speed'"),
    ('return "acme.graph:Capture"', 'return ""', "ability 'graph_capture' is declared, and fitment_graph_capture names no class"),
    ('"acme.graph:Capture"', '"acme.graph.Capture"', "fitment_graph_capture: 'acme.graph.Capture' is not 'module:Class'"),
    ('"dtype": ("bf16"', '"dtypes": ("bf16"', "default 'dtypes' is none of dtype, activations, kv_dtype"),
    ('("bf16", "fp32")', '["bf16"]', "default 'dtype': ['bf16'] is no tuple of dtypes"),
    ('("bf16", "fp32")', '()', "default 'dtype': () is no tuple of dtypes"),
    ('("bf16", "fp32")', '("bf16", "half")', "default 'dtype': ('bf16', 'half') is no tuple of dtypes"),
]


@pytest.mark.parametrize(("old", "new", "problem"), DECLARATIONS)
def test_a_declaration_that_is_wrong(old: str, new: str, problem: str, write: Writer) -> None:
    registry = load({"null": NULL, "acme": write((old, new))})
    row = only_broken(registry)
    assert row.stage == "declarations"
    assert problem in row.problem
    assert "acme.rows" not in registry.facts


def test_fact_keys_outside_the_plugins_prefix(write: Writer) -> None:
    row = only_broken(load({"null": NULL, "acme": write(('FactKey("acme.rows"', 'FactKey("rows"'))}))
    assert row.stage == "fact keys"
    assert "a plugin declares keys under its own prefix, 'acme.'" in row.problem


def test_every_wrong_declaration_is_told_at_once(write: Writer) -> None:
    row = only_broken(load({"null": NULL, "acme": write(
        ('Hardware("acme-1", "acme"', 'Hardware("acme-1", "other"'), ('[Kernel("linear"', '[Kernel("lineal"'),
        ('("bf16", "fp32")', "()"), ('"acme", 16, ORDER', '"acme", -1, ORDER'))}))
    assert row.problem.startswith("platform acme: 4 problems\n")


def test_an_interrupt_is_the_users(write: Writer) -> None:
    with pytest.raises(KeyboardInterrupt):
        load({"acme": write(source="raise KeyboardInterrupt")})


# Devices


@pytest.mark.parametrize(("old", "new", "problem"), [
    ("def fitment_devices():\n", "def fitment_devices():\n    raise OSError('driver 535 expected')\n", "OSError: driver 535 expected"),
    ("def fitment_devices():\n", "def fitment_devices():\n    return []\n", "fitment_devices returned [] (list), wanted Listing"),
    ("def fitment_devices():\n", "def fitment_devices():\n    return Listing(('acme:0',))\n", "AttributeError: 'str' object has no"),
    ('Device("acme:0"', 'Device("other:0"', "other:0: its id does not start with 'acme:'"),
    ('Device("acme:0", "acme"', 'Device("acme:0", "other"', "acme:0 says platform 'other', wanted 'acme'"),
    ('Facts({"arch": "a1"})', 'Facts({"arch": 1})', "acme:0: fact 'arch' = 1 has type int, wanted str"),
])
def test_a_listing_that_fails_is_a_reason(old: str, new: str, problem: str, write: Writer) -> None:
    registry = load({"acme": write((old, new)), "null": NULL})
    assert registry.broken == []
    assert [device.id for device in registry.devices] == ["null:0"]
    (reason,) = registry.platforms["acme"].listing.reasons
    assert (reason.code, reason.remedy) == ("FIT-ENV-DEVICES", "capabilities plugins acme")
    assert problem in reason.found


def test_devices_are_looked_for_when_they_are_asked_for(write: Writer) -> None:
    module = write(("ORDER =", "LOOKED = []\nORDER ="), ("def fitment_devices():\n", "def fitment_devices():\n    LOOKED.append(1)\n"))
    registry = load({"acme": module})
    looked = sys.modules[module].LOOKED
    assert looked == []
    assert len(registry.devices) == len(registry.devices) == 1
    assert looked == [1]


# Where plugins are found


def test_the_variable_names_plugins(write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTRA_VARIABLE, f"null={NULL}, acme={write()},")
    registry = load()
    assert list(registry.platforms) == ["null", "acme"]
    assert registry.platforms["null"].distribution == EXTRA_VARIABLE


@pytest.mark.parametrize("value", ["acme", "acme=", "=acme.plugin", f"null={NULL},acme"])
def test_a_variable_that_is_written_wrongly(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTRA_VARIABLE, value)
    with pytest.raises(FitmentError, match=r"^FITMENT_PLUGINS: '.*' is not name=module, such as acme=acme_fitment.plugin$"):
        load()


def test_the_argument_wins_over_the_variable_and_both_over_what_is_installed(
    write: Writer, monkeypatch: pytest.MonkeyPatch, installed: list[EntryPoint]
) -> None:
    installed.append(EntryPoint("acme", "no_such_package", PLATFORM_GROUP))
    good = write()
    monkeypatch.setenv(EXTRA_VARIABLE, "acme=neither_is_this")
    assert load({"acme": good}).broken == []
    monkeypatch.setenv(EXTRA_VARIABLE, f"acme={good}")
    assert load().broken == []
    monkeypatch.delenv(EXTRA_VARIABLE)
    assert [row.problem for row in load().broken] == ["ModuleNotFoundError: No module named 'no_such_package'"]


def test_installed_plugins_come_in_the_order_of_names_and_the_first_of_two_counts(write: Writer, installed: list[EntryPoint]) -> None:
    installed += [EntryPoint("null", NULL, PLATFORM_GROUP), EntryPoint("acme", write(), PLATFORM_GROUP),
                  EntryPoint("acme", "no_such_package", PLATFORM_GROUP), EntryPoint("null", NULL, "another.group")]
    registry = load()
    assert list(registry.platforms) == ["acme", "null"]
    assert registry.broken == []


def test_a_plugin_can_be_an_object_in_a_module(write: Writer, installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("acme", f"{write()}:Nothing", PLATFORM_GROUP))
    (row,) = load().broken
    assert row.stage == "import"
    assert "Nothing" in row.problem


# Engines


def test_engines(write: Writer, installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("toy", write(source=ENGINE), ENGINE_GROUP))
    registry = load({"null": NULL})
    assert registry.broken == []
    engine = registry.engines["toy"]
    assert (engine.name, engine.version, engine.architectures, engine.features) == ("toy", "1.2", ("llama",), ("logprobs",))


@pytest.mark.parametrize(("old", "new", "stage", "problem"), [
    ("@hookimpl\ndef fitment_engine", "def engine", "hooks", "fitment_engine is missing; every plugin implements it"),
    ('return EngineInfo("toy", "1.2", ("llama",), ("logprobs",))', "return 'toy'", "fitment_engine",
     "fitment_engine returned 'toy' (str), wanted EngineInfo"),
    ('("logprobs",)', '("logprob",)', "declarations", "features 'logprob' are none of continuous_batching, "),
    ('("logprobs",)', "None", "declarations", "TypeError: 'NoneType' object is not iterable"),
    ('">=1.0,<2"', '">=2"', "api", "built for API >=2, this is 1.0"),
])
def test_a_broken_engine(old: str, new: str, stage: str, problem: str, write: Writer, installed: list[EntryPoint]) -> None:
    installed.append(EntryPoint("toy", write((old, new), source=ENGINE), ENGINE_GROUP))
    registry = load({"null": NULL})
    row = only_broken(registry)
    assert registry.engines == {}
    assert (row.name, row.stage) == ("toy", stage)
    assert row.problem.startswith(problem)


def test_many_broken_ones_harm_nobody(write: Writer) -> None:
    broken = {f"broken{i}": write((f"def fitment_{hook}():\n", f"def fitment_{hook}():\n    {body}\n"))
              for i, (hook, body, _) in enumerate(WRONG)}
    registry = load({**broken, "null": NULL, "acme": write()})
    assert list(registry.platforms) == ["null", "acme"]
    assert [row.name for row in registry.broken] == list(broken)


@pytest.mark.parametrize("condition", ['equals("torch", "2.6.0")', 'at_most("memory_bandwidth", 1)', 'is_in("cores", (1, 2))',
                                       'version("glibc", ">=2.28") | has("isa", "avx2")', 'multiple_of("acme.rows", 4)'])
def test_a_condition_that_fits_its_facts(condition: str, write: Writer) -> None:
    assert load({"acme": write(('at_least("acme.rows", 4)', condition))}).broken == []
