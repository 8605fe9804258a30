"""Distillation: one copy of the weights, exact resume, merging; its text; its memory estimate.

python -m pytest tests/test_distill.py
"""

import dataclasses
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import small_rms
import torch
from helpers import ROOT, contents, events, records
from small_rms import SHAPE, L, sequences

import distill
import model
from common.distributed import Ranks
from common.errors import CheckpointError, ConfigError, DataError, HFError, UserError
from configurator import parse_args
from data.documents import Document
from hf.config import SHAPES
from load import load_model
from model import GPT
from posthoc import adapters, text
from train import TrainConfig
from training.checkpoint import BEST, DISTILLING
from training.loop import Loop
from training.run import RunFolder

pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("handlers_stay")
WORDS = (
    "--rank=4",
    "--adapter_alpha=8",
    "--batch_size=4",
    "--gradient_accumulation_steps=2",
    "--max_iters=6",
    "--eval_interval=3",
    "--log_interval=1",
    "--eval_blocks=8",
    "--calibration_blocks=8",
    "--coupled_first=0",
    "--learning_rate=3e-3",
    "--warmup_iters=1",
    "--device=cpu",
    "--shuffle=20",
)


@pytest.fixture
def words(run_folder, tmp_path):
    return [
        *WORDS,
        f"--teacher={run_folder}",
        f"--local={run_folder / 'text.txt'}",
        f"--out_dir={tmp_path / 'out'}",
    ]


def start(words) -> Loop:
    """A run that is set up; `.run()` trains."""
    config = parse_args(distill.DistillConfig, words)[0]
    folder = RunFolder(config, Ranks.start(config.device))
    folder.find(config.resume, (DISTILLING,))
    return distill.set_up(config, folder)


@pytest.mark.parametrize("method", ["dora", "lora", "full"])
def test_the_student_learns_and_the_teacher_does_not_move(method, words, run_folder, tmp_path):
    slow = ["--learning_rate=1e-4"] if method == "full" else []
    loop = start([*words, f"--method={method}", *slow])
    pair = loop.objective.pair
    teacher, before, idx = pair.frozen[0], load_model(str(run_folder)), sequences(4, 50)
    shared = {tensor.data_ptr() for tensor in teacher.state_dict().values()}
    frozen = [p for p in pair.student.parameters() if not p.requires_grad]
    assert all(p.data_ptr() in shared for p in frozen)  # no second copy
    assert bool(frozen) == (method != "full")
    loop.run()
    assert torch.equal(teacher(idx), before(idx))  # error exactly 0
    first, *_, last = events(tmp_path / "out", "eval")
    assert last["kl"] < first["kl"] and first["teacher_val_loss"] == last["teacher_val_loss"]
    result, student = records(tmp_path / "out")[-1]["summary"], load_model(str(tmp_path / "out"))
    merged = loop.objective.measure(loop, distill.Pair(teacher, student), "eval")["kl"]
    assert result["kl"] == merged == pytest.approx(last["kl"], rel=1e-3)  # of what is saved
    assert result["norm_plan"] == "Rs Rs Rs R"
    assert str(student.plan) == "Rs Rs Rs R" and student.config.coupled_alpha == 1
    assert student.state_dict().keys() == before.state_dict().keys() and student.meta == before.meta


@pytest.mark.parametrize("dora", [True, False])
@torch.no_grad()
def test_merged_and_absorbed_student_is_the_unmerged(dora, trained_rms):
    teacher, idx = (
        distill.view(trained_rms, "RR Rs ss R", (1.0, 1.0, 1.0, 1.2, 1.1, 0.9, 1.0)),
        sequences(8, 3),
    )
    student = distill.view(teacher, "RR Rs ss R", teacher.config.coupled_alpha)
    adapters.add_adapters(student, 4, 8.0, dora)
    trained_ones = [parameter for parameter in student.parameters() if parameter.requires_grad]
    assert sum(p.numel() for p in trained_ones) == adapters.adapter_parameters(GPT(SHAPE), 4, dora)
    same = (student(idx) - teacher(idx)).abs().max() / teacher(idx).abs().max()
    assert same < 5e-6  # adapters change nothing at first
    for parameter in trained_ones:
        parameter += 0.1 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())
        )
    unmerged, untouched = student(idx), teacher(idx)
    merged = distill.finished(student)
    assert merged.config.coupled_alpha == 1 and not any(
        "lora" in name for name in merged.state_dict()
    )
    assert (unmerged - untouched).abs().max() > 0.1 * untouched.abs().max()
    assert (merged(idx) - unmerged).abs().max() <= 5e-6 * unmerged.abs().max()
    assert torch.equal(teacher(idx), untouched)  # merging took copies


@pytest.mark.parametrize("method", ["dora", "lora"])
def test_adapters_start_at_a_teacher_in_bfloat16(method, words):
    loop = start([*words, f"--method={method}", "--dtype=bfloat16", f"--coupled_first={L}"])
    pair = loop.objective.pair
    assert pair.frozen[0].wte.weight.dtype == torch.bfloat16 and len(loop.objective.parameters) > 0
    with torch.no_grad(), loop.precision.autocast():
        assert not pair.token_kl(*pair.hidden(sequences(8, 3))).any()  # exactly 0


# float16 scales its loss
@pytest.mark.parametrize("method, dtype", [("dora", "float32"), ("full", "float16")])
def test_resume_is_exact(method, dtype, words, tmp_path):
    words += [f"--method={method}", f"--dtype={dtype}", "--coupled_first=1"]
    words += ["--checkpoint_activations=False"]
    halves = [*words, f"--out_dir={tmp_path / 'halves'}"]
    distill.main([*words, f"--out_dir={tmp_path / 'whole'}"])
    loop = start(halves)
    loop.folder.stop_signal.name = "SIGINT"
    loop.run()
    assert records(tmp_path / "halves")[-1]["reason"] == "stopped by SIGINT after step 1"
    with pytest.raises(CheckpointError, match=r"has not finished: the same distill\.py command"):
        load_model(str(tmp_path / "halves"))
    with pytest.MonkeyPatch.context() as patch:  # killed after the checkpoint of step 3
        save = Loop.save
        patch.setattr(Loop, "save", lambda *words: (save(*words), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            distill.main(halves)
    distill.main(halves)
    whole, other = (load_model(str(tmp_path / name)).state_dict() for name in ("whole", "halves"))
    assert all(torch.equal(whole[name], other[name]) for name in whole)
    for more, named in (
        (["--rank=5"], "rank 4 -> 5"),
        (["--rank=5", "--max_iters=8"], "rank 4 -> 5"),
        (["--resume=never"], "holds a run already"),
    ):
        with pytest.raises(UserError, match=named):
            distill.main([*halves, *more])


def test_other_data_are_refused_on_resume_and_another_place_is_told(words, run_folder, tmp_path):
    """Text and held-out text of the same size, and another teacher; other code and versions."""
    whole = (run_folder / "text.txt").read_bytes()
    middle = len(whole) // 2
    other = whole[:middle] + whole[middle : middle + 40][::-1] + whole[middle + 40 :]
    teacher = load_model(str(run_folder))
    small_rms.write_run(teacher, tmp_path)
    for name in ("local", "val"):
        (tmp_path / f"{name}.txt").write_bytes(whole)
        words += [f"--{name}={tmp_path / name}.txt"]
    words += [f"--teacher={tmp_path / BEST}"]
    distill.main([*words, "--max_iters=1"])
    before = contents(tmp_path / "out")
    teacher.wte.weight.data[3, 5] += 1
    (tmp_path / "other").mkdir()
    small_rms.write_run(teacher, tmp_path / "other")
    weights = (tmp_path / "other" / BEST).read_bytes()
    for name, content in {"local.txt": other, "val.txt": other, BEST: weights}.items():
        good = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content)
        part = "teacher" if name == BEST else name
        with pytest.raises(CheckpointError, match=rf"trained on other data \({part}:"):
            distill.main([*words, "--max_iters=2"])
        (tmp_path / name).write_bytes(good)
    assert contents(tmp_path / "out") == before
    path = tmp_path / "out" / DISTILLING
    state = torch.load(path, weights_only=True)
    state["provenance"]["world_size"] = 4
    state["provenance"]["versions"]["torch"] = "1.0"
    torch.save(state, path)
    distill.main([*words, "--max_iters=2", "--device=auto"])  # the same device
    changed = ["max_iters 1 -> 2", "world_size 4 -> 1", f"torch 1.0 -> {torch.__version__}"]
    assert events(tmp_path / "out", "resume")[0]["changed"] == changed


def test_a_finished_distillation(words, tmp_path, capsys, monkeypatch):
    """It is not touched; killed while it ended, or its student removed, it ends once more."""
    words, out = [*words, "--max_iters=1"], tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(distill, "write_model", lambda *words: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            distill.main(words)
    assert records(out)[-1]["event"] != "end"
    distill.main(words)
    assert records(out)[-1]["reason"] == "done"
    lines, before = capsys.readouterr().out.splitlines(), contents(out)
    assert any("warm-up takes warmup_iters=1 of max_iters=1" in line for line in lines)
    with monkeypatch.context() as patch:
        patch.setattr(distill, "load_model", None)  # not even its teacher is loaded
        distill.main(words)
    assert "finished already" in capsys.readouterr().out and contents(out) == before
    with pytest.raises(ConfigError, match="seed 1337 -> 7"):
        distill.main([*words, "--seed=7"])
    (out / BEST).unlink()
    distill.main(words)
    assert (out / BEST).exists()


def test_a_resumed_distillation_keeps_to_its_commit(words, run_folder, monkeypatch):
    """Of a data set of the hub, in every epoch."""
    rows = [{"text": (run_folder / "text.txt").read_text()}]
    datasets = mock.Mock()
    datasets.load_dataset.return_value.skip = lambda count: rows[count:]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    for commit, steps in (("old", 1), ("new", 2)):
        monkeypatch.setattr(distill, "newest_commit", lambda name, commit=commit: commit)
        distill.main([*words, "--local=", f"--max_iters={steps}"])
    asked = [call.kwargs["revision"] for call in datasets.load_dataset.call_args_list]
    assert len(asked) > 3 and set(asked) == {"old"}


def test_activation_checkpointing_changes_nothing(words, tmp_path):
    calls, forward = [], model.Block.forward
    for value in ("False", "True"):
        words += [f"--out_dir={tmp_path / value}", f"--checkpoint_activations={value}"]
        with mock.patch.object(
            model.Block, "forward", autospec=True, side_effect=forward
        ) as counted:
            distill.main([*words, "--max_iters=3"])
        calls.append(counted.call_count)
    assert events(tmp_path / "True", "eval") == events(tmp_path / "False", "eval")
    assert calls[1] - calls[0] == 3 * 2 * L  # each block once more, a micro-batch


def test_what_is_measured(words, monkeypatch):
    """Losses are those of the models; first positions are told apart; alpha may be given."""
    loop = start([*words, "--alpha=1.25"])
    distillation = loop.objective
    assert distillation.alpha == (1, 1.25) * L + (1,)
    assert distillation.pair.student.blocks[0].norm2.norm.alpha == 1.25
    pair = distillation.pair
    found = distillation.measure(loop, pair, "eval")
    ids = distillation.text.val  # (N, T)
    with torch.no_grad():
        for key, gpt in (("val_loss", pair.student), ("teacher_val_loss", pair.frozen[0])):
            assert found[key] == pytest.approx(float(gpt(ids[:, :-1], ids[:, 1:])[0]), rel=1e-5)
    assert found["val_loss"] != found["teacher_val_loss"]
    ramp = torch.arange(24.0) + 100
    monkeypatch.setattr(pair, "token_kl", lambda x, taught: ramp.expand(len(x), 24))
    found = distillation.measure(loop, pair, "eval")
    assert found["kl_first"] == 100 and found["kl"] == pytest.approx(112)


def test_two_ranks_do_what_one_does(words, run_folder, tmp_path, train_ok):
    # The plan is chosen, too.
    words = [word for word in words if "coupled_first" not in word] + ["--budget=1e-3"]
    distill.main([*words, f"--out_dir={tmp_path / 'one'}"])
    two = f"--out_dir={tmp_path / 'two'}"
    train_ok(*words, two, ranks=2, program="distill", patch=("ranks_disagree", {}))
    for one, two in zip(*(events(tmp_path / name, "eval") for name in ("one", "two")), strict=True):
        assert one["step"] == two["step"] and two["kl"] == pytest.approx(one["kl"], rel=1e-3)
    one, two = (load_model(str(tmp_path / name)) for name in ("one", "two"))
    assert str(one.plan) == str(two.plan) and "s" in one.plan.letters
    before, one, two = load_model(str(run_folder)).state_dict(), one.state_dict(), two.state_dict()
    moved = max((tensor - before[name]).abs().max() for name, tensor in one.items())
    apart = max((tensor - two[name]).abs().max() for name, tensor in one.items())
    assert apart < 1e-3 * moved


def test_a_shape_with_random_weights_and_tokens(words, monkeypatch, tmp_path):
    """What the speed of the large shapes is measured with: no tokenizer, no text."""
    tiny = {
        "model_type": "qwen3",
        "vocab_size": 67,
        "max_position_embeddings": 16,
        "hidden_size": 32,
        "head_dim": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    words = [*words, "--teacher=random:tiny", "--dataset=random", "--local=", "--export=True"]
    found, idx = [], sequences(2, 1)[:, :16]
    # A finished run is repeated (nothing trains), and continued.
    for steps, measured in ((2, [0, 2]), (2, [0, 2]), (4, [0, 2, 3, 4])):
        distill.main([*words, f"--max_iters={steps}"])
        assert [event["step"] for event in events(tmp_path / "out", "eval")] == measured
        exported = distill.weights.load_hf(tmp_path / "out/hf")
        found.append(exported(idx))
        assert torch.equal(found[-1], load_model(str(tmp_path / "out"))(idx))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[1], found[2])


# --------------------------------------------------------------------------------------------- text


TOKENIZER = text.teacher_tokenizer({"tokenizer": "bytes"}, 257)


def test_blocks_pack_documents():
    documents = [Document("abc", ""), Document("", "empty"), Document("defgh", "")]
    packed = list(text.blocks(iter(documents), TOKENIZER, 4, "a file"))
    assert torch.stack(packed).tolist() == [[256, 97, 98, 99], [256, 100, 101, 102]]
    stream = [torch.tensor([i]) for i in range(100)]
    mixed = [int(block) for block in text.shuffled(iter(stream), 10, seed=3)]
    assert sorted(mixed) == list(range(100)) != mixed
    assert mixed == [int(block) for block in text.shuffled(iter(stream), 10, seed=3)]


def test_chats_go_through_the_teachers_template(monkeypatch, tmp_path):
    row = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]
    }
    with pytest.raises(DataError, match="no chat template"):
        text.text_of_rows({"tokenizer": "bytes"})(row)
    tokenizer = mock.Mock(
        apply_chat_template=lambda messages, tokenize: "".join(
            f"<{turn['role']}>{turn['content']}" for turn in messages
        )
    )
    monkeypatch.setattr(text, "load_chat_tokenizer", lambda meta: tokenizer)
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n" + json.dumps({"text": "plain"}) + "\n")
    found = list(text.read_files([path], text.text_of_rows({})))
    assert [document.text for document in found] == ["<user>Hi<assistant>Yes?", "plain"]


def test_rows_without_text_are_told(tmp_path):
    (tmp_path / "a.jsonl").write_text('not json\n{"foo": 1}\n')
    documents = text.read_files([tmp_path / "a.jsonl"])
    told = r"a.jsonl: no row with .*1 times broken JSON, 1 times no \"text\"\): a row needs"
    with pytest.raises(DataError, match=told):
        list(text.blocks(documents, TOKENIZER, 4, "a.jsonl"))


@pytest.mark.parametrize(
    ("more", "error", "match"),
    [
        (["--local=nowhere.jsonl"], DataError, "no file nowhere"),
        (["--eval_blocks=100000"], DataError, "too little text"),
        (["--local=SHORT"], DataError, "too little text.* or --val=FILE"),
        (["--coupled_first=4"], ConfigError, "coupled_first=4: the teacher has 3 blocks"),
        (["--block_size=1"], ConfigError, "block_size=1: must be at least 2"),
        (["--beta1=-1"], ConfigError, "beta1=-1.0: must be at least 0"),
        (["--norm_plan=Rs Rs", "--coupled_first=auto"], ConfigError, "norm_plan"),
        (["--norm_plan=Rs Rs Rs R"], ConfigError, "both name the plan.*--coupled_first=auto"),
        (["--teacher=random:qwen4"], HFError, "unknown shape"),
        (["--teacher=COUPLED"], ConfigError, "teacher=.*shares statistics already"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(more, error, match, words, run_folder, tmp_path):
    coupled = GPT(dataclasses.replace(SHAPE, norm_type="coupled", coupled_calibrate=2))
    small_rms.write_run(coupled, tmp_path)
    # 8 blocks and a rest
    (tmp_path / "short.txt").write_text((run_folder / "text.txt").read_text()[: 8 * 24 + 5])
    files = {"SHORT": str(tmp_path / "short.txt"), "COUPLED": str(tmp_path)}
    more = [re.sub("SHORT|COUPLED", lambda found: files[found[0]], word) for word in more]
    with pytest.raises(error, match=match) as caught:
        distill.main([*words, *more])
    assert "\n" not in str(caught.value)


# ------------------------------------------------------------------------------------------- memory


def test_memory_estimate_of_a_published_shape(monkeypatch):
    """At once, for no weights are drawn. One GPU of 141 GB is enough."""
    found = []
    monkeypatch.setattr(adapters, "memory_line", found.append)
    distill.main(["--teacher=random:qwen3-8b", "--dtype=bfloat16", "--estimate"])
    parts = found[0]
    assert parts["parameters"] == 8_190_735_360 and 60 < parts["total"] / adapters.GIB < 130


@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_the_estimate_of_activations_is_what_backward_keeps(method, monkeypatch):
    """Bytes of all tensors with a row a token, of one block more, under autocast to bfloat16."""
    monkeypatch.setattr("model.attends_wider", lambda q: False)  # as on a GPU
    tokens, kept = 61, []
    for layers in (1, 2):
        shape = dataclasses.replace(
            SHAPE,
            n_layer=layers,
            block_size=tokens,
            n_embd=72,
            n_head=6,
            n_kv_head=3,
            head_dim=16,
            n_inner=160,
            qk_norm="head",
        )
        teacher = GPT(shape).eval().requires_grad_(False)
        student, seen = (
            distill.view(teacher.bfloat16() if method != "full" else teacher, "Rs " * layers + "R"),
            {},
        )
        if method == "full":
            student.requires_grad_(True)
        else:
            adapters.add_adapters(student, 12, 24.0, method == "dora")

        def keep(tensor, seen=seen):
            if tokens in tensor.shape:
                seen[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
            torch.autocast("cpu", torch.bfloat16),
        ):
            end = student.hidden(torch.zeros(1, tokens, dtype=torch.long))
        kept.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))
        del end
    parts = adapters.memory(shape, method, 12, tokens, low=True, checkpointing=False)
    assert parts["activations"] / 2 == pytest.approx(kept[1] - kept[0], rel=0.08)


# --------------------------------------------------------------------------------- repro/posthoc.sh

STUB = """#!/usr/bin/env bash
[ "$1" != -m ] || shift
echo "$1" >> calls
echo "$(printf '%q ' "$@")" >> words  # one write: two runs may end at the same time
for word; do case $word in
  --out_dir=*/text_?) ;;
  --out_dir=*)
    mkdir -p "${word#*=}"
    echo '{"event": "end", "reason": "done"}' > "${word#*=}/log.jsonl";;
esac; case $word in
  --out_dir=*text_?) mkdir -p "${word#*=}" && touch "${word#*=}/meta.json";;
  --out=*|--plot=*) echo new > "${word#*=}";;
esac; done
"""


def test_the_script_skips_what_its_own_folder_has_and_no_more(tmp_path):
    """In a fresh clone results/ holds records of another run: they must not stand for steps of this
    one.
    """
    shutil.copytree(ROOT / "repro", tmp_path / "repro")
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    for part in ("train", "val"):
        (tmp_path / f"openstax_ccby_{part}.jsonl.xz").write_bytes(lzma.compress(b"{}\n{}\n"))
    results = tmp_path / "results"
    results.mkdir()
    (results / "sizes.jsonl").write_text("old\n")
    places = {name: str(tmp_path / name.lower()) for name in ("PYTHON", "OUT", "RESULTS")}
    for _ in range(2):
        command = ["bash", "repro/posthoc.sh", str(tmp_path)]
        subprocess.run(command, cwd=tmp_path, env=os.environ | places | {"JOBS": "2"}, check=True)
    assert (tmp_path / "calls").read_text().split().count("posthoc.rms_stats") == 1
    assert (results / "sizes.jsonl").read_text() == "new\n"
    found = {}  # (program, name of its run folder) -> config
    for line in (tmp_path / "words").read_text().splitlines():
        program, *words = shlex.split(line.replace("config/", f"{ROOT}/config/"))
        if program in ("train.py", "distill.py"):
            kind = distill.DistillConfig if program == "distill.py" else TrainConfig
            config, _ = parse_args(kind, words)
            found[program, Path(config.out_dir).name] = config
    assert len(found) == 3 * 4
    for seed, first in ((1, 0), (2, 1)):
        control = found["train.py", f"teacher-longer-{seed}"]
        student = found["distill.py", f"student-{first}-{seed}"]
        assert (control.seed, control.learning_rate) == (student.seed, student.learning_rate)
        assert (control.init_from, control.max_iters) == (student.teacher, student.max_iters)
        assert student.coupled_first == first and Path(student.teacher).name == f"teacher-{seed}"
