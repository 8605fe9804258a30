"""Run lm-evaluation-harness's own command line, which then knows our models as `nanonorm`.

    python -m evals.lm_eval --model nanonorm --model_args spec=out/run \\
      --tasks arc_easy,piqa --num_fewshot 5 --limit 100 --output_path out/marks.json   (network)
    python -m evals.lm_eval --model nanonorm --model_args spec=out/run,dtype=float32 \\
      --tasks mine --include_path folder/with/yaml --device cpu

Options, tasks, tables and files are the harness's; `run --help` lists them, and `ls tasks` its
tasks. Model arguments: spec (a run folder, checkpoint, Hugging Face folder or hub name), dtype
(auto, float32, bfloat16) and context (tokens; default: the model's). Tasks that ask for
likelihoods run; those that generate text do not. Needs lm-eval: pip install lm-eval.

Differences to evals.lm_eval_model, which compares several models item by item: one model, and
tasks exactly as the harness reads them. In lm-eval 0.4.13 that is wrong for gpqa, whose choices
are shuffled anew when they are marked; evals.lm_eval_model shuffles them once.
"""

import common.interrupt  # noqa: F401

import sys

from common.errors import UserError, run_program
from evals.lm_eval_tasks import import_lm_eval


def main(argv: list[str]) -> None:
    """Run the harness with these command-line arguments."""
    if argv in ([], ["-h"], ["--help"]):
        print(__doc__)
        argv = ["run", "--help"]
    import_lm_eval()  # one line if it is missing
    from lm_eval.__main__ import cli_evaluate

    import evals.harness_model  # noqa: F401  registers our models

    sys.argv = ["lm-eval", *argv]
    try:
        cli_evaluate()
    # what it raises for unknown tasks and models, and for data that it cannot get
    except (KeyError, ValueError, TypeError, OSError, AssertionError) as error:
        reason = str(error.args[0] if error.args else error)
        raise UserError(f"lm-evaluation-harness: {type(error).__name__}: {reason[:300]}") from None


if __name__ == "__main__":
    run_program(main)
