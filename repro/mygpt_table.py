"""Compare the four mygpt runs with the chapter's figures in one table (a step of mygpt.sh).

    python -m repro.mygpt_table RUNS TARGET

Copies each run's log.jsonl into TARGET and writes TARGET/README.md from them.
"""

import shutil
from pathlib import Path

from common.errors import run_program
from common.output import markdown, write_bytes_atomically
from evidence.runs import Run

STEPS = (1, 500, 1000, 1500, 2000)
# Norm type -> parameters, and training loss of one batch at each of STEPS. As printed in the
# chapter, sections 24.8 and 24.9 (on an Apple GPU).
CHAPTER = {
    "layer": (207296, (41.0367, 2.5944, 2.3529, 2.1795, 2.0785)),
    "rms": (206720, (41.2164, 2.5935, 2.3517, 2.1689, 2.0752)),
}


def main(argv: list[str]) -> None:
    """Copy the logs and write the table."""
    runs, target = map(Path, argv)
    target.mkdir(parents=True, exist_ok=True)
    rows = []
    for norm, (params, losses) in CHAPTER.items():
        rows.append([f"chapter, {norm}", f"{params:,}", *losses, "not given", ""])
    findings = []
    for init in ("torch", "gpt2"):
        final = {}
        for norm in CHAPTER:
            source = runs / f"{init}-{norm}"
            log = Run(source).events
            shutil.copyfile(source / "log.jsonl", target / f"{init}-{norm}.jsonl")
            losses = {record["step"]: record["loss"] for record in log if record["event"] == "step"}
            val = [record["val_loss"] for record in log if record["event"] == "eval"][-1]
            final[norm] = (losses[STEPS[-1]], val)
            commit = log[0]["git"]
            short = commit[:7] + commit[40:]  # with a + if the tree had uncommitted changes
            shown = [f"{loss:.4f}" for loss in (*(losses[step] for step in STEPS), val)]
            rows.append([f"init={init}, {norm}", f"{log[0]['n_params']:,}", *shown, short])
        pairs = zip(final["layer"], final["rms"], strict=True)
        train, val = (f"{abs(a / b - 1):.2%}" for a, b in pairs)
        findings.append(
            f"- init={init}: the last training losses of layer and rms are {train} apart, their "
            f"val losses {val}."
        )
    start = log[0]
    steps = [f"step {step}" for step in STEPS]
    table = markdown(["run", "parameters", *steps, "val loss at 2000", "commit"], rows)
    text = f"""# LayerNorm and RMSNorm on Tiny Shakespeare

Training loss of single batches, nats per character. {start["device"]}, torch \
{start["versions"]["torch"]}; made by `repro/mygpt.sh`. A + behind a commit: with uncommitted \
changes.
The chapter draws random windows from the whole text; here 90 % of it is training data, in \
blocks, each once an epoch. So its later losses are a neighbourhood, not a target; parameters and \
first loss are.

{table}

"""
    text += "\n".join(findings) + "\n"
    write_bytes_atomically(target / "README.md", text.encode())
    print(text)


if __name__ == "__main__":
    run_program(main, __doc__)
