"""configurator.py: the command line and config files.

    python -m pytest tests/test_configurator.py

Most tests feed it something wrong: what is right is used by every other test.
"""

import ast
import dataclasses
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ConfigError
from configurator import help_text, key, parse_args, read_config_file


@dataclasses.dataclass(frozen=True)
class Base:
    n_layer: int = key(12, "number of blocks")
    dropout: float = key(0.0, "dropout probability")


@dataclasses.dataclass(frozen=True)
class Config(Base):
    bias: bool = key(False, "biases everywhere")
    norm_type: str = key("layer", "normalisation", ("layer", "rms"))
    out_dir: str = key("out", "folder")
    attn_bias: bool | None = key(None, "biases in attention")
    n_kv: int | None = key(None, "key and value heads")
    name: str | None = key(None, "a text or auto")
    alpha: float | tuple[float, ...] = key(1.0, "one number or several")
    scaling: tuple[float, ...] = key((), "several numbers")
    names: tuple[str, ...] = key((), "several names")


def parse(*argv: str) -> Config:
    return parse_args(Config, list(argv))[0]


@pytest.fixture
def config_file(tmp_path):
    def write(source: str | bytes, name: str = "config.py") -> str:
        path = tmp_path / name
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return str(path)

    return write


# ------------------------------------------------------------------------------------- command line


def test_defaults_types_and_inheritance():
    assert parse() == Config()
    # a bare switch is true
    assert parse("--bias").bias and not parse("--bias", "--bias=false").bias
    config = parse("--n_layer=3", "--dropout=1", "--bias=true", "--norm_type=rms", "--out_dir=a=b")
    assert config == Config(n_layer=3, dropout=1.0, bias=True, norm_type="rms", out_dir="a=b")
    assert type(config.dropout) is float
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.n_layer = 4


@pytest.mark.parametrize(
    ("typed", "meant"), [("n_layers", "n_layer"), ("drop_out", "dropout"), ("Bias", "bias")]
)
def test_unknown_key_names_the_nearest(typed, meant, config_file):
    with pytest.raises(ConfigError, match=f"'{typed}'.*did you mean {meant}\\?"):
        parse(f"--{typed}=1")
    with pytest.raises(ConfigError, match=f"config.py.*'{typed}'.*did you mean {meant}\\?"):
        parse(config_file(f"{typed} = 1"))
    with pytest.raises(ConfigError, match="--help lists all keys"):
        parse("--zzzzzz=1")


@pytest.mark.parametrize(
    ("key", "wanted", "values"),
    [
        ("n_layer", "int", ["1.5", "1e3", "", "True", "twelve"]),
        ("bias", "bool", ["1", "yes", ""]),
        ("dropout", "float", ["nan", "inf", "-inf", "1e999", "0.1,0.2", "x"]),
        ("attn_bias", r"bool \| auto", ["2"]),
        ("n_kv", r"int \| auto", ["none"]),
        ("alpha", r"float \| tuple\[float, \.\.\.\]", ["1,x", "nan", "1,inf"]),
        ("scaling", r"tuple\[float, \.\.\.\]", ["x"]),
    ],
)
def test_wrong_type_on_the_command_line_names_key_and_type(key, wanted, values):
    for value in values:
        with pytest.raises(ConfigError, match=f"{key} must be {wanted}"):
            parse(f"--{key}={value}")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("n_layer = 1.5", "int"),
        ("n_layer = True", "int"),
        ("n_layer = '3'", "int"),
        ("n_layer = None", "int"),
        ("n_layer = (1,)", "int"),
        ("bias = 1", "bool"),
        ("norm_type = 'batch'", "layer, rms; got 'batch'"),
        ("bias = 'true'", "bool"),
        ("dropout = '0.1'", "float"),
        ("dropout = True", "float"),
        ("out_dir = 1", "str"),
        ("alpha = (1.0, '2')", "float"),
        ("alpha = True", "float"),
        ("n_kv = 2.0", "int"),
    ],
)
def test_wrong_type_in_a_file_names_file_key_and_type(line, wanted, config_file):
    key = line.split()[0]
    with pytest.raises(ConfigError, match=rf"config\.py:1: {key} (must be|is one of) .*{wanted}"):
        parse(config_file(line))


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("attn_bias", "auto", None),
        ("attn_bias", "false", False),
        ("n_kv", "auto", None),
        ("n_kv", "2", 2),
        ("name", "auto", None),
        ("name", "x", "x"),
        ("alpha", "2", 2.0),
        ("alpha", "1,2.5", (1.0, 2.5)),
        ("alpha", "(1, 2.5)", (1.0, 2.5)),
        ("scaling", "8,1", (8.0, 1.0)),
        ("names", "a,b-1", ("a", "b-1")),
        ("names", "a", ("a",)),
        ("names", "", ()),
    ],
)
def test_auto_is_none_and_values_are_one_or_several(key, text, value):
    assert getattr(parse(f"--{key}={text}"), key) == value


def test_auto_and_several_values_in_a_file(config_file):
    source = "attn_bias = None\nn_kv = 'auto'\nname = 'auto'\nalpha = [1, 2.5]\nscaling = (1,)"
    assert parse(config_file(source)) == Config(alpha=(1.0, 2.5), scaling=(1.0,))


def test_later_words_win(config_file):
    first = config_file("n_layer = 1\nout_dir = 'x'", "first.py")
    second = config_file("n_layer = 2", "second.py")
    for words, n_layer in (
        ((first, second), 2),
        ((second, first), 1),
        (("--n_layer=3", first), 1),
        ((first, "--n_layer=3", "--n_layer=4"), 4),
    ):
        assert parse(*words) == Config(n_layer=n_layer, out_dir="x")


@pytest.mark.parametrize(
    "word",
    [
        "--n_layer",
        "-bias",
        "--attn_bias",
        "-n_layer=3",
        "n_layer=3",
        "-",
        "--",
        "--=",
        "",
        "config.txt",
        "--=3",
    ],
)
def test_words_that_are_no_settings(word):
    with pytest.raises(ConfigError):
        parse(word)


def test_model_spec():
    assert parse_args(Config, ["out/run", "--n_layer=3"], spec=True) == (
        Config(n_layer=3),
        "out/run",
    )
    with pytest.raises(ConfigError, match="neither a config file"):
        parse_args(Config, ["out/run", "out/other"], spec=True)
    with pytest.raises(ConfigError, match="name a model"):
        parse_args(Config, [], spec=True)


def test_help_lists_every_key_with_type_default_and_a_line(capsys):
    with pytest.raises(SystemExit) as caught:
        parse_args(Config, ["--n_layer=3", "--help"], "What it does.")
    assert not caught.value.code
    text = capsys.readouterr().out
    assert (
        text.startswith("What it does.")
        and text.strip() == help_text(Config, "What it does.").strip()
    )
    for field in dataclasses.fields(Config):
        default = "auto" if field.default is None else repr(field.default)
        assert f"--{field.name}={default}  (" in text and field.metadata["help"] in text
    assert "(layer|rms)" in text and "(int | auto)" in text


# ------------------------------------------------------------------------------------- config files


def test_what_a_file_may_hold(config_file):
    source = '''"""What it reproduces."""
_tokens = 2**19          # private: arithmetic on literals
_per_step = 8 * 1024
n_layer = _tokens // _per_step % 60 + 1
dropout = -(1 - 1.5) / 2
bias = True
out_dir = "out/" "run"   # Python joins literals by itself
alpha = (_tokens, -1, +0.5)
n_kv = n_layer
'''
    assert parse(config_file(source)) == Config(
        n_layer=5, dropout=0.25, bias=True, out_dir="out/run", alpha=(524288.0, -1.0, 0.5), n_kv=5
    )
    assert read_config_file(config_file("")) == {}
    # a byte order mark
    assert read_config_file(config_file("﻿n_layer = 1\r\n")) == {"n_layer": (1, 1)}


REFUSED = {
    "import": "import os",
    "from import": "from os import system",
    "call": "n_layer = int('3')",
    "call alone": "print(1)",
    "import call": "out_dir = __import__('os').getcwd()",
    "attribute": "n_layer = (3).real",
    "attribute target": "_a = 1\n_a.b = 2",
    "lambda": "n_layer = lambda: 3",
    "list comprehension": "alpha = [i for i in (1, 2)]",
    "generator": "alpha = (i for i in (1, 2))",
    "dict": "_a = {1: 2}",
    "set": "_a = {1, 2}",
    "subscript": "_a = (1, 2)\nn_layer = _a[0]",
    "subscript target": "_a = (1, 2)\n_a[0] = 3",
    "f-string": "out_dir = f'{1}'",
    "f-string of a call": "out_dir = f'{print(1)}'",
    "bytes": "out_dir = b'x'",
    "complex": "dropout = 1j",
    "ellipsis": "n_layer = ...",
    "root of a negative": "dropout = (-8) ** 0.5",
    "string times": "out_dir = 'x' * 10**9",
    "string plus": "out_dir = 'x' + 'y'",
    "format": "out_dir = '%s' % 3",
    "tuple times": "alpha = (1,) * 10**9",
    "bool arithmetic": "n_layer = True + 1",
    "none arithmetic": "n_layer = -None",
    "division by zero": "dropout = 1 / 0",
    "modulo zero": "n_layer = 1 % 0",
    "float overflow": "dropout = 1e300 * 1e300",
    "infinite literal": "dropout = 1e999",
    "nested tuple": "alpha = (1, (2, 3))",
    "shift": "n_layer = 1 << 40",
    "bitwise": "n_layer = ~3",
    "not": "bias = not True",
    "comparison": "bias = 1 < 2",
    "and": "bias = True and False",
    "conditional": "n_layer = 1 if True else 2",
    "unknown name": "n_layer = depth",
    "name of a builtin": "n_layer = len",
    "used in its own line": "n_layer = n_layer",
    "star": "alpha = (*(1, 2),)",
    "walrus": "n_layer = (_a := 3)",
    "chained": "n_layer = _a = 3",
    "unpacking": "n_layer, _a = 3, 4",
    "augmented": "_a = 1\n_a += 2",
    "annotated": "n_layer: int = 3",
    "del": "_a = 1\ndel _a",
    "if": "if True:\n    n_layer = 3",
    "while": "while True: pass",
    "with": "with open('x') as _f: pass",
    "def": "def f(): pass",
    "class": "class n_layer: pass",
    "decorator": "@print\ndef f(): pass",
    "assert": "assert 1",
    "raise": "raise SystemExit",
    "global": "global n_layer",
    "match": "match 1:\n    case _: pass",
    "number alone": "3",
    "await": "n_layer = await f",
    "pass": "pass",
}


@pytest.mark.parametrize("source", REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_file_and_line(source, config_file):
    lines = ["# a comment", *source.splitlines()]
    # the last
    statement = max(number for number, line in enumerate(lines, 1) if not line.startswith(" "))
    with pytest.raises(ConfigError, match=rf"config\.py:{statement}: ") as caught:
        parse(config_file("\n".join(lines)))
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, r"config\.py cannot be read"),
        (b"out_dir = '\xff\xfe'", r"config\.py.*not valid syntax.*utf-8"),
        (b"n_layer = 3\0", r"config\.py"),
        ("n_layer = 3\nn_layer = = 4", r"config\.py:2: not valid syntax"),
    ],
)
def test_not_a_config_file_at_all(config_file, tmp_path, content, named):
    path = tmp_path / "config.py"
    path.mkdir() if content is None else config_file(content)
    with pytest.raises(ConfigError, match=named):
        parse(str(path))


# ------------------------------------------------------------------------------------------ fuzzing

FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
EXECUTED: list[str] | None = None  # what Python reports while a test watches, else None


def watch(event: str, arguments: tuple) -> None:
    """An audit hook: Python reports every exec, import, process, socket and file operation."""
    if EXECUTED is not None and event.partition(".")[0] in (
        "exec",
        "import",
        "os",
        "subprocess",
        "socket",
        "shutil",
    ):
        EXECUTED.append(f"{event} {arguments}")


sys.addaudithook(watch)


def parse_watched(word: str) -> None:
    """Parse, and check that nothing was executed and nothing but ConfigError raised."""
    global EXECUTED
    EXECUTED = []
    try:
        parse(word)
    except ConfigError as error:
        assert str(error)
    except SystemExit:
        assert word in ("--help", "-h")
    finally:
        executed, EXECUTED = EXECUTED, None
    assert not executed


def test_the_watch_sees_an_execution(config_file, monkeypatch):
    """It fails for a configurator that executes: else the fuzz tests below would prove nothing."""
    parse_watched(config_file("n_layer = 1"))
    parsed = ast.parse
    monkeypatch.setattr(ast, "parse", lambda source: exec(source) or parsed(source))
    with pytest.raises(AssertionError):
        parse_watched(config_file("n_layer = 1"))


ATTACK = "__import__('os').system('echo executed')"
ATOMS = st.sampled_from(
    [
        ATTACK,
        "1",
        "0",
        "-1",
        "2.5",
        "1e300",
        "1e999",
        "True",
        "None",
        "'text'",
        "b'x'",
        "f'{print(1)}'",
        "...",
        "1j",
        "n_layer",
        "_a",
        "os",
        "print",
        "eval",
        "__builtins__",
        "open('sentinel', 'w')",
        "'x'.__class__.__mro__",
    ]
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(
            st.sampled_from(
                ["+", "-", "*", "/", "//", "%", "**", "@", "<<", "|", " and ", "==", " if 1 else "]
            ),
            inner,
            inner,
        ).map(lambda parts: f"({parts[1]}{parts[0]}{parts[2]})"),
        st.tuples(inner, inner).map(lambda parts: f"{parts[0]}({parts[1]})"),
        st.tuples(inner, inner).map(lambda parts: f"{parts[0]}[{parts[1]}]"),
        st.tuples(inner, inner).map(lambda parts: f"({parts[0]}, {parts[1]})"),
        inner.map(lambda part: f"(lambda: {part})()"),
        inner.map(lambda part: f"[{part} for _ in (1,)]"),
        inner.map(lambda part: f"f'{{{part}}}'" if "'" not in part else f"-{part}"),
        inner.map(lambda part: f"{part}.real"),
        inner.map(lambda part: f"(_w := {part})"),
    ),
    max_leaves=6,
)
STATEMENTS = st.one_of(
    st.tuples(
        st.sampled_from(
            [field.name for field in dataclasses.fields(Config)] + ["_a", "_b", "unknown"]
        ),
        EXPRESSIONS,
    ).map(lambda parts: f"{parts[0]} = {parts[1]}"),
    EXPRESSIONS,
    EXPRESSIONS.map(lambda part: f"@{part}\ndef f(x={part}): pass"),
    EXPRESSIONS.map(lambda part: f"n_layer: {part} = {part}"),
    EXPRESSIONS.map(lambda part: f"if {part}: n_layer = 1"),
    EXPRESSIONS.map(lambda part: f"class C({part}): pass"),
    EXPRESSIONS.map(lambda part: f"import os\n{part}"),
    st.sampled_from(
        [
            "'''docstring'''",
            "from os import *",
            "del n_layer",
            "global x",
            "_a = _a",
            "\t",
            "\0",
            "\\",
        ]
    ),
)


@FUZZ
@given(st.lists(STATEMENTS, max_size=5).map("\n".join))
def test_generated_python_never_runs(config_file, source):
    parse_watched(config_file(source))


@FUZZ
@given(
    st.one_of(
        st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
        st.binary(),
        st.text("()[]{}'\"\\=+-*/%_ \n\t01ean,.#:").map(str.encode),
    )
)
def test_arbitrary_bytes_never_run(config_file, source):
    parse_watched(config_file(source))


@FUZZ
@given(st.text())
def test_arbitrary_words(text):
    for word in (text, f"--{text}", f"/nowhere/{text}.py"):
        parse_watched(word)


@dataclasses.dataclass(frozen=True)
class Bounded:
    clip: float = key(1.0, "largest norm", least=1e-6, most=100.0, zero=True)
    width: int = key(8, "channels", least=1, most=1 << 20)
    alpha: tuple[float, ...] = key((), "one for each block", least=0.5)


def test_bounds_and_their_help():
    def bounded(*argv):
        return parse_args(Bounded, list(argv))[0]

    assert bounded("--clip=0").clip == 0 and bounded("--clip=1e-6").clip == 1e-6
    for word, message in (
        ("--clip=1e-7", "clip=1e-07: must be 0 or at least 1e-06"),
        ("--clip=101", "clip=101.0: must be .*at most 100"),
        ("--width=0", "width=0: must be at least 1"),
        ("--width=1048577", "width=1048577: must be .*at most 1048576"),
        ("--alpha=1,0.4", r"alpha=\(1.0, 0.4\): must be at least 0.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            bounded(word)
    shown = help_text(Bounded, "")
    assert "(float, 0 or at least 1e-06, at most 100)" in shown
    assert "(int, at least 1, at most 1048576)" in shown
