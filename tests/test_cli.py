# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast

from conftest import CONFIGS, tiny_model
from hf_kvq import PMKVQCache, PMKVQConfig
from hf_kvq.cli import display, main
from hf_kvq.cli.options import parse_cache_config
from hf_kvq.cli.report import Snapshot, cells, format_bytes
from hf_kvq.estimate import cache_bytes, model_shapes, ordinary_bytes
from hf_kvq.registration import CACHES, cache_argument


PROMPT = "w3 w14 w15 w92"
# Widths 16, 8 and 4 all occur within a hundred tokens.
SMALL = ["--cache-config", '{"window": 16, "group_size": 16}']
GENERATE = ["generate", "--prompt", PROMPT, "--no-do-sample", "--dtype", "float32", "--max-new-tokens", "100", *SMALL]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny random model and its tokenizer, in a folder."""
    path = tmp_path_factory.mktemp("tiny")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(128)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0").save_pretrained(path)
    tiny_model().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(capsys):
    """Run the command in this process; returns (status, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            status = main(arguments)
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def expected(folder: str, cache_class: type, new_tokens: int = 100, **options) -> tuple[str, object]:
    """The text that the same generation gives without the command, and its cache."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    length = inputs["input_ids"].shape[1]
    if cache_class is DynamicCache:
        cache = DynamicCache(config=model.config)
    else:
        cache = cache_class(model.config, options, max_length=length + new_tokens)
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, **{cache_argument(model): cache})
    return tokenizer.decode(out[0, length:], skip_special_tokens=True), cache


# ---- Wrong arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generat"], "invalid choice: 'generat' (choose from "),
        (["generate", "--promt", "x"], "did you mean --prompt?"),
        (["generate", "--max_new_tokens=5"], "did you mean --max-new-tokens?"),
        (["inspect", "m", "--contexts", "2k"], "did you mean --context?"),
        (["generate", "stray"], "unknown argument 'stray'; see hf-kvq generate --help"),
        (["generate", "--max-new-tokens", "0"], "--max-new-tokens: expected a positive integer, got '0'"),
        (["generate", "--temperature", "nan"], "--temperature: expected a number greater than 0, got 'nan'"),
        (["generate", "--cache-implementation", "pmkv"], "invalid choice: 'pmkv' (choose from "),
        (["generate", "--cache-config", "windw=3"], "unknown option 'windw' for PMKVQConfig; did you mean 'window'?"),
        (["generate", "--cache-config", "fbit=3"], "fbit must be one of 16, 8, 4, 2; got 3"),
        (["generate", "--cache-config", "window=many"], "window must be an integer; got 'many'"),
        (["generate", "--cache-config", "window"], "takes key=value or a JSON object, got 'window'"),
        (["generate", "--cache-config", "{window: 3}"], "is not valid JSON"),
        (
            ["generate", "--cache-implementation", "kivi", "--cache-config", "bit=4"],
            "unknown option 'bit' for KIVIConfig; did you mean 'bits'?",
        ),
        (
            ["generate", "--cache-implementation", "dynamic", "--cache-config", "window=3"],
            "dynamic has no options",
        ),
        (["generate", "--device", "gpu"], "--device: Expected one of cpu, cuda"),
        (["inspect"], "the following arguments are required: MODEL"),
        (["inspect", "m", "--context", "2k,0"], "expected numbers of tokens such as 2k,32768, got '2k,0'"),
        (["inspect", "m", "--cache-config", "fbit=4"], "fbit has no place here"),
    ],
)
def test_a_wrong_argument_gives_one_line_and_status_2(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert err.startswith("hf-kvq") and message in err
    assert err.count("\n") == 1 and err.endswith("\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["fbit=[4, 2]"], "fbit lists 2 layers, but the model has 3"),
        (["budget_bytes=10"], "budget_bytes=10 is too small"),
    ],
)
def test_an_option_that_does_not_fit_the_model_gives_one_line(run, folder, options, message):
    status, out, err = run("generate", "--model", folder, "--prompt", PROMPT, "--cache-config", *options)
    assert (status, out.strip()) == (2, "")
    assert message in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("command", [["inspect"], ["generate", "--model"]])
def test_a_missing_model_gives_one_line_and_status_1(run, tmp_path, command):
    status, out, err = run(*command, str(tmp_path / "nothing"))
    assert (status, out) == (1, "")
    assert "there is no file or folder" in err and err.count("\n") == 1


def test_a_model_that_cannot_be_quantized_gives_one_line(run, tmp_path):
    CONFIGS["sliding"]().save_pretrained(tmp_path)
    status, out, err = run("inspect", str(tmp_path))
    assert (status, out) == (1, "")
    assert "nothing to quantize" in err and err.count("\n") == 1


def test_no_command_prints_the_help(run):
    status, out, err = run()
    assert (status, out) == (2, "")
    assert "generate" in err and "inspect" in err


def test_every_cache_has_its_options():
    for cache in CACHES.values():
        assert type(cache(CONFIGS["llama"](), None, max_length=64).config) is cache.config_class


def test_cache_config_takes_pairs_and_json():
    assert parse_cache_config([]) == {}
    given = ["window=16", "key_codec=token", '{"fbit": [8, 4], "window": 32}', "fbit=[4,2]", "max_length=null"]
    assert parse_cache_config(given) == {"window": 32, "key_codec": "token", "fbit": [4, 2], "max_length": None}


# ---- inspect


def test_inspect_prints_a_table(run, folder):
    status, out, err = run("inspect", folder, "--dtype", "bfloat16", "--context", "1k,32768")
    assert (status, err) == (0, "")
    shapes = model_shapes(CONFIGS["llama"](), torch.bfloat16)
    for length in (1024, 32768):
        sizes = [ordinary_bytes(shapes, length), *(cache_bytes(shapes, length, bits) for bits in (16, 8, 4, 2))]
        row = r"\s+".join(re.escape(cell) for cell in (f"{length:,}", *map(format_bytes, sizes)))
        assert re.search(rf"^\s*{row}$", out, re.MULTILINE)
    assert re.search(r"^\s*tokens\s+ordinary\s+16 bits\s+8 bits\s+4 bits\s+2 bits$", out, re.MULTILINE)
    assert "3 layers of full attention, 2 KV heads of 16 channels: quantized" in out
    assert "The model itself is made for up to 512 tokens." in out


def test_inspect_prints_json(run, folder):
    options = ["--json", "--batch", "3", "--context", "100,2k", "--dtype", "float32", "--cache-config", "window=16"]
    status, out, err = run("inspect", folder, *options)
    assert (status, err) == (0, "")
    report = json.loads(out)
    shapes, config = model_shapes(CONFIGS["llama"](), torch.float32), PMKVQConfig(window=16)
    assert report["contexts"] == [
        {
            "tokens": length,
            "ordinary": ordinary_bytes(shapes, length, 3),
            "bits": {str(bits): cache_bytes(shapes, length, bits, config, 3) for bits in (16, 8, 4, 2)},
        }
        for length in (100, 2048)
    ]
    assert (report["model"], report["dtype"], report["batch"]) == (folder, "float32", 3)
    assert report["config"]["window"] == 16
    layers = {"quantized": True, "kind": "full attention", "kv_heads": 2, "key_dim": 16, "value_dim": 16, "count": 3}
    assert report["layers"] == [layers]


def test_inspect_reads_a_config_file_and_names_exact_layers(run, tmp_path):
    CONFIGS["mixed"]().save_pretrained(tmp_path)
    status, out, _ = run("inspect", str(tmp_path / "config.json"))
    assert status == 0
    assert "2 layers of DynamicSlidingWindowLayer, at most 8 tokens: kept exact" in out
    assert "1 layer of full attention" in out


# ---- generate


def test_text_goes_to_stdout_and_widths_to_stderr(run, folder):
    status, out, err = run(*GENERATE, "--model", folder)
    text, cache = expected(folder, PMKVQCache, window=16, group_size=16)
    assert status == 0
    assert out == text + "\n"
    status_lines = re.findall(r"^\[(\d+) tokens\] (3 layers at \d+ bits); .* held, .* true bits$", err, re.MULTILINE)
    assert [widths for _, widths in status_lines] == [f"3 layers at {bits} bits" for bits in (16, 8, 4)]
    assert [int(tokens) for tokens, _ in status_lines] == sorted(int(tokens) for tokens, _ in status_lines)
    (sink,), (packed,), (recent,) = (cache.summary()[0][name] for name in ("sink", "packed", "recent"))
    held = format_bytes(cache.nbytes())
    assert f"{held}, everything counted: {sink + recent} tokens exact, {packed} packed" in err
    assert f"{format_bytes(cache.exact_nbytes())} in an ordinary cache" in err
    assert f"{cache.true_bits():.2f} per number held" in err
    assert "4 of prompt + 100 new" in err and "\033" not in err + out


def test_the_ordinary_cache_can_be_watched(run, folder):
    arguments = [a for a in GENERATE if a not in SMALL]
    status, out, err = run(*arguments, "--model", folder, "--cache-implementation", "dynamic")
    assert (status, out) == (0, expected(folder, DynamicCache)[0] + "\n")
    assert "32.00 per number held" in err and "1.00 times" in err


@pytest.mark.parametrize("name", ["mixkvq", "kivi"])
def test_other_caches_can_be_watched(run, folder, name):
    arguments = [a for a in GENERATE if a not in SMALL]
    options = ["--cache-implementation", name, "--cache-config", "residual=32", "--cache-config", "group_size=16"]
    status, out, err = run(*arguments, "--model", folder, *options)
    assert (status, out) == (0, expected(folder, CACHES[name], residual=32, group_size=16)[0] + "\n")
    assert re.search(r"^widths +3 layers at 16 bits to begin with\n +3 layers at 2 bits from token", err, re.MULTILINE)
    assert ("keys at 2.5" in err) == (name == "mixkvq")


def test_sampling_depends_on_the_seed_alone(run, folder):
    arguments = [a for a in GENERATE if a != "--no-do-sample"]
    texts = [run(*arguments, "--model", folder, "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_a_chat_template_is_used(run, folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text("w7 {{ messages[0]['content'] }} w8 w9")
    status, _, err = run(*GENERATE, "--model", str(tmp_path))
    assert status == 0 and "7 of prompt + 100 new" in err


def test_an_empty_prompt_is_an_error(run, folder):
    status, out, err = run("generate", "--model", folder, "--prompt", "")
    assert (status, out) == (2, "")
    assert "--prompt is empty" in err and err.count("\n") == 1


def test_what_the_cache_logs_comes_after_the_text(run, folder, caplog):
    status, out, err = run(*GENERATE, "--model", folder, "--cache-config", "max_length=71")
    assert status == 0 and len(out.split()) == 100
    assert re.search(r"^note +a request outgrew the KV cache's budget of 71 tokens", err, re.MULTILINE)
    assert not [record for record in caplog.records if record.name.startswith("hf_kvq")]


def test_an_exceeded_budget_keeps_the_text(run, folder):
    options = ["--cache-config", '{"max_length": 60, "on_overflow": "error"}']
    status, out, err = run(*GENERATE, "--model", folder, *options)
    assert status == 2
    assert len(out.split()) == 57  # 4 of the prompt, 56 in the cache, and one more that never reached it
    assert "57 new" in err and "row 0 would hold 61 tokens" in err.splitlines()[-1]


# ---- Ctrl-C and closed pipes


@pytest.mark.parametrize("presses", [1, 2])
def test_interrupt_ends_with_the_summary_so_far(run, folder, monkeypatch, presses):
    shown = []

    def show(self, snapshot):
        shown.append(snapshot)
        if len(shown) == 30:
            for _ in range(presses):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(display.StatusLines, "show", show)
    before = signal.getsignal(signal.SIGINT)
    status, out, err = run(*GENERATE, "--model", folder)
    assert (status, len(shown)) == (130, 30)
    text = expected(folder, PMKVQCache, window=16, group_size=16)[0]
    assert out.endswith("\n") and text.startswith(out.rstrip("\n"))
    # The second one comes in the middle of a step, whose text is not out yet.
    assert len(out.split()) == 31 - presses
    assert "4 of prompt + 30 new" in err and "interrupted" in err and "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "hf_kvq.cli", *arguments]


@pytest.mark.slow
def test_interrupt_of_the_real_process(folder):
    arguments = [a.replace("100", "100000") for a in GENERATE]
    process = subprocess.Popen(
        command(*arguments, "--model", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped   interrupted" in err and "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["inspect", "generate"])
def test_a_closed_pipe_ends_quietly(folder, kind):
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [*GENERATE, "--model", folder] if kind == "generate" else ["inspect", folder]
    done = subprocess.run(command(*arguments), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert done.returncode == 1
    assert "Error" not in done.stderr and "Traceback" not in done.stderr


# ---- The terminal


class FakeTerminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch):
    """A terminal, whose size can be set; what is written to it is kept."""
    terminal = FakeTerminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def resize(columns: int, lines: int) -> None:
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("LINES", str(lines))

    terminal.resize = resize
    resize(80, 24)
    return terminal


SNAPSHOT = Snapshot(437, 300, (16,) * 4 + (8,) * 26, 8_000_000, 10_000_000, 12.345)


def plain(text: str) -> str:
    return re.sub(r"\033\[[0-9;]*m", "", text)


def test_live_status_sets_a_region_and_takes_it_back(terminal):
    with display.status_display(terminal, terminal) as live:
        live.show(SNAPSHOT)
        shown = terminal.getvalue()
    assert "\033[1;22r" in shown
    assert "\033[23;1H\033[2K" + "█" * 4 + "▄" * 26 + "  4 layers at 16 bits, 26 at 8" in plain(shown)
    assert "\033[24;1H\033[2K437 tokens | 7.63 MiB held, ordinary cache 9.54 MiB | 12.35 true bits" in plain(shown)
    assert terminal.getvalue()[len(shown) :] == "\0337\033[r\0338\033[J"


def test_live_status_follows_the_terminals_size(terminal):
    with display.status_display(terminal, terminal) as live:
        live.show(SNAPSHOT)
        terminal.resize(120, 40)
        live.show(Snapshot(438, 300, (8,) * 30, 1, 1, 1.0))
    assert "\033[1;22r" in terminal.getvalue() and "\033[1;38r" in terminal.getvalue()


def test_live_status_is_not_drawn_more_often_than_it_can_be_read(terminal, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    with display.status_display(terminal, terminal) as live:
        lengths = []
        for now[0] in (1.0, 1.01, 1.2):  # noqa: B020
            live.show(SNAPSHOT)
            lengths.append(len(terminal.getvalue()))
    assert lengths[0] == lengths[1] < lengths[2]


@pytest.mark.parametrize("columns", [1, 10, 33, 60, 80, 120])
def test_live_status_never_fills_a_line(terminal, columns):
    terminal.resize(columns, 24)
    for line in display.LiveStatus(terminal, terminal)._lines(SNAPSHOT, columns - 1):
        assert len(plain(line)) < columns


def test_colours_and_blocks_only_where_they_can_be_shown(monkeypatch, terminal):
    assert cells((16, 8, 4, 2), "utf-8", colour=False) == "█▄▂▁"
    assert cells((16, 8, 4, 2), "ascii", colour=False) == "#842"
    live = display.LiveStatus(terminal, terminal)
    assert "\033[" in live._lines(SNAPSHOT, 79)[0]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in live._lines(SNAPSHOT, 79)[0]


@pytest.mark.parametrize(("term", "lines"), [("dumb", 24), ("xterm", 4)])
def test_terminals_that_cannot_keep_a_region_get_lines(terminal, monkeypatch, term, lines):
    monkeypatch.setenv("TERM", term)
    terminal.resize(80, lines)
    with display.status_display(terminal, terminal) as status:
        status.show(SNAPSHOT)
    assert terminal.getvalue() == (
        "[437 tokens] 4 layers at 16 bits, 26 at 8; 7.63 MiB held, ordinary cache 9.54 MiB; 12.35 true bits\n"
    )


@pytest.mark.parametrize("columns", [3, 7, 20, 80])
@pytest.mark.parametrize(
    "text",
    ["one two three  four\n\nfive " * 9, "x" * 200, "字" * 50 + " and 字", "tabs\there\tand\tthere " * 5, "", "\n"],
    ids=["words", "long", "wide", "tabs", "empty", "newline"],
)
def test_wrapped_text_stays_off_the_last_column(terminal, text, columns):
    terminal.resize(columns, 24)
    live = display.LiveStatus(terminal, terminal)
    # However the text is cut into pieces.
    pieces = re.findall(r"\S+\s*|\s+", text)
    wrapped = "".join(live.wrap(piece) for piece in pieces)
    assert all(display._columns(line) < columns for line in wrapped.split("\n"))
    assert "".join(wrapped.split()) == "".join(text.split())
    if columns == 80:
        assert wrapped.count("\n\n") == text.count("\n\n")


def test_text_for_a_file_is_not_wrapped(terminal):
    assert display.LiveStatus(terminal, io.StringIO()).wrap("a " * 100) == "a " * 100


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (1536 * 1024, "1.50 MiB"), (47185920, "45.0 MiB"),
     (188743680, "180 MiB"), (2**30, "1.00 GiB"), (5000 * 2**30, "5,000 GiB")],
)  # fmt: skip
def test_format_bytes(count, text):
    assert format_bytes(count) == text


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("script") is None, reason="needs script(1) for a pseudo-terminal")
def test_on_a_real_terminal_the_text_arrives_whole(folder, tmp_path):
    inner = " ".join(f"'{a}'" for a in command(*GENERATE, "--model", folder))
    log = tmp_path / "log"
    done = subprocess.run(
        ["script", "-qec", f"stty cols 60 rows 20; {inner}", str(log)],
        # A size in the environment, as some runners have it, would be believed before the terminal's.
        env={**{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")}, "TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        timeout=120,
    )
    assert done.returncode == 0
    shown = log.read_text()
    assert "\033[1;18r" in shown and shown.count("\0337") == shown.count("\0338")
    # Without what is drawn between save and restore, the text is what it is without a terminal.
    text = re.sub(r"\033\[J|\033D|\033\[\d+A", "", re.sub(r"\0337.*?\0338", "", shown, flags=re.DOTALL))
    assert " ".join(expected(folder, PMKVQCache, window=16, group_size=16)[0].split()) in " ".join(text.split())


@pytest.mark.slow
def test_the_default_command_passes_through_all_widths():
    # Sampled text differs between machines, and might end early on some.
    done = subprocess.run(
        command("generate", "--no-do-sample", "--max-new-tokens", "340"), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 150
    widths = re.findall(r"^\[\d+ tokens\] 30 layers at (\d+) bits", done.stderr, re.MULTILINE)
    assert widths == ["16", "8", "4"]
