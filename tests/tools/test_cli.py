"""python -m sparse_attn: its commands on a tiny saved model, and its sentences."""

import re
import shutil
import subprocess
import sys

import pytest
import torch

import sparse_attn as sa
from sparse_attn import _cli_inputs, cli
from sparse_attn.cli import main

WORDS = [f"w{number}" for number in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama of two layers with a tokenizer of words, saved as transformers saves models."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from tiny_models import CONFIGS, build

    path = tmp_path_factory.mktemp("model")
    build(CONFIGS["llama"](), "sdpa").save_pretrained(path)
    vocabulary = {word: number for number, word in enumerate(["<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(0, len(WORDS), (400,), generator=generator).tolist()
    path.write_text(" ".join(WORDS[number] for number in chosen))
    return path


@pytest.fixture(autouse=True)
def on_cpu_without_windows(device, monkeypatch):
    if device != "cpu":
        pytest.skip("the command chooses its device itself")
    monkeypatch.setenv("MPLBACKEND", "Agg")


def run(*arguments):
    return main([*map(str, arguments), "--quiet", "--device", "cpu"])


def test_info_names_versions_and_engines():
    done = subprocess.run(
        [sys.executable, "-m", "sparse_attn", "info"], capture_output=True, text=True, check=True
    )
    rows = dict(re.split(" {2,}", line) for line in done.stdout.splitlines())
    names = ["sparse_attn", "Python", "torch", "transformers", "CPU", "built with"]
    assert list(rows)[: len(names)] == names and len(rows) > len(names)
    assert rows["torch"] == torch.__version__ and rows["CPU"].startswith(
        "served by tiled and naive"
    )
    assert "-real" not in done.stdout


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("torch has no CUDA; install it", "not served, the CPU alone is: torch has no CUDA; inst"),
        (None, "none that torch sees"),
    ],
)
def test_info_without_a_gpu_says_why_in_one_row(monkeypatch, capsys, reason, says):
    monkeypatch.setattr(cli._load, "cuda_error", reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("GPU")]
    assert row.split(None, 1)[1].startswith(says)


def test_info_names_gpus_and_their_engines(monkeypatch, capsys):
    answer = sa.Capability("portable", ("sparse_attn: why not hopper",), True)
    monkeypatch.setattr(cli._load, "cuda_error", None)
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (8, 9),
        "get_device_name": "NVIDIA L4",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *index, value=value: value)
    monkeypatch.setattr(torch, "zeros", lambda *sizes, **options: None)
    monkeypatch.setattr(cli, "can_use", lambda *tensors: answer)
    assert main(["info"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(r"cuda:0 +NVIDIA L4 \(.* 8\.9\): served by portable; .*not hopper", row)


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        (["75-real", "80-real", "80-virtual", "90a-real"], "7.5, 8.0, 9.0; others from 8.0 on by"),
        (["75-virtual", "80-virtual", "90a-real"], "9.0; others from 7.5 on by PTX"),
        (["90a-real"], "9.0"),
        (["100"], "10.0; others from 10.0 on by PTX"),
    ],
)
def test_info_says_which_gpus_the_code_is_for(architectures, words):
    assert cli._capabilities(architectures).startswith(words)


def test_profile(folder, text, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("profile", folder, "--text", text, "--length", 128, "--out", out) == 0
    table = capsys.readouterr().out
    assert "128 positions our dense attention takes" in table
    assert (out / "profile.txt").read_text() == table


def test_compare_writes_table_and_picture(folder, text, tmp_path, capsys):
    out = tmp_path / "new" / "out"
    assert run("compare", folder, "--text", text, "--length", 64, "--out", out) == 0
    table = capsys.readouterr().out
    assert "dense" in table and "band 16" in table
    assert (out / "compare.txt").read_text() == table
    assert (out / "compare.png").stat().st_size > 1000


def test_advise_writes_policy_and_report(folder, text, tmp_path, capsys):
    given = ("--text", text, "--length", 96)
    assert run("advise", folder, *given, "--keep", 0.5, "--out", tmp_path) == 0
    said = capsys.readouterr().out
    assert "of the pairs" in said
    files = [tmp_path / name for name in ("policy.json", "report.html", "advice.png")]
    assert said.splitlines()[-3:] == list(map(str, files)) and all(f.is_file() for f in files)
    assert "<html" in (tmp_path / "report.html").read_text()
    policy = tmp_path / "policy.json"
    assert run("compare", folder, *given, "--policy", policy) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("policy ")


def test_a_policy_file_may_be_called_dense(folder, text, tmp_path, capsys):
    sa.Policy(sa.Band((7, 0))).save(tmp_path / "dense.json")
    given = ("--text", text, "--length", 96, "--policy", tmp_path / "dense.json")
    assert run("compare", folder, *given) == 0
    assert capsys.readouterr().out.splitlines()[2].startswith("policy dense ")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(model="nowhere"), "expected a model's folder, got nowhere, which does not exist"),
        (dict(model="."), r"expected a folder with config.json, or one .gguf file, got"),
        (dict(text="nowhere"), "expected a text file, got nowhere"),
        (dict(length=100000), "expected 200000 tokens .* got 400; lower --length"),
        (dict(length=0), "expected a length of at least 1, got 0"),
        (dict(keep=2), "expected keep above 0 and up to 1, got 2"),
        (dict(device="toaster"), "expected a device of this machine, got toaster"),
        (dict(device="meta"), "expected a device of this machine, got meta"),
        (dict(out=__file__), "expected a folder for --out, got .*, which is a file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_errors_are_sentences(folder, text, tmp_path, monkeypatch, capsys, change, sentence):
    monkeypatch.chdir(tmp_path)
    given = dict(model=folder, text=text, length=64, keep=0.5, device="cpu") | change
    model = given.pop("model")
    options = [part for name, value in given.items() for part in (f"--{name}", str(value))]
    assert main(["advise", str(model), "--quiet", *options]) == 1
    import re

    error = capsys.readouterr().err
    assert re.search(rf"^python -m sparse_attn advise: .*{sentence}", error)
    assert error.count("\n") == 1


@pytest.mark.parametrize(("command", "words"), [("profile", 0), ("advise", 0), ("advise", 1)])
def test_a_text_that_no_length_fits(folder, tmp_path, capsys, command, words):
    short = tmp_path / "short.txt"
    short.write_text(" ".join(WORDS[:words]))
    assert run(command, folder, "--text", short) == 1
    assert re.search(rf" tokens .*in .*, got {words}; give a longer t", capsys.readouterr().err)


def test_pictures_that_cannot_be_drawn_are_said_before_the_search(
    folder, text, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(_cli_inputs, "find_spec", lambda name: None)
    assert run("advise", folder, "--text", text, "--out", tmp_path) == 1
    sentence = "expected matplotlib for the pictures of --out (the extra `plot`), got none: pip"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "change", "sentence"),
    [
        ("profile", dict(text="nowhere"), "expected a text file, got nowhere (No such file"),
        ("profile", dict(text="."), "expected a text file, got . (Is a directory)"),
        ("profile", dict(out="file"), "expected a folder for --out, got file, which is a file"),
        ("profile", dict(out="file/below"), "got file/below, whose part file is a file"),
        ("advise", dict(out="/proc/below"), "expected --out where files can be made, got /proc/be"),
        ("compare", dict(policy="nowhere"), "expected a policy file, got nowhere"),
        ("advise", dict(keep=2), "expected keep above 0 and up to 1, got 2"),
        ("advise", dict(keep="nan"), "expected keep above 0 and up to 1, got nan"),
        ("advise", dict(validate="nowhere"), "expected a text file, got nowhere"),
        ("advise", dict(out="file"), "expected a folder for --out, got file, which is a file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_wrong_is_said_before_the_model_loads(
    text, tmp_path, monkeypatch, capsys, command, change, sentence
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a result of before")
    (tmp_path / "config.json").write_text("{}")  # no model, which is only seen when it loads
    given = dict(text=text, length=64) | change
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    assert run(command, tmp_path, *options) == 1
    assert sentence in capsys.readouterr().err


def test_a_file_that_holds_no_model_is_named(text, capsys):
    assert run("profile", text, "--text", text) == 1
    sentence = "expected a folder with config.json, or one .gguf file, got"
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("model.safetensors", None, "cut off"),
        ("config.json", '"num_attention_heads": 4', '"num_attention_heads": 3'),
        ("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": "two"'),
        ("config.json", '"vocab_size": 97', '"vocab_size": 50'),
    ],
    ids=["weights", "heads", "layers", "vocabulary"],
)
def test_a_damaged_model_is_named(folder, text, tmp_path, capsys, file, old, new):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / file
    path.write_text(new if old is None else path.read_text().replace(old, new))
    capsys.readouterr()
    assert run("profile", tmp_path, "--text", text, "--length", 64) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"expected a causal language model in {tmp_path}, got: " in last


@pytest.mark.parametrize("name", ["BertModel", "BertForMaskedLM"])
def test_an_encoder_is_refused(folder, text, tmp_path, capsys, name):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=91,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    getattr(transformers, name)(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    for command in ("profile", "compare", "advise"):
        assert run(command, tmp_path, "--text", text, "--length", 64) == 1
        said = capsys.readouterr().err
        assert f"expected a causal language model in {tmp_path}, got {name}" in said
        assert "an encoder goes to sa.profile" in said


def test_help_reads_well(capsys):
    for arguments in ([], ["advise"]):
        with pytest.raises(SystemExit) as end:
            main([*arguments, "--help"])
        assert end.value.code == 0
        assert "MODEL_FOLDER" in capsys.readouterr().out or not arguments
