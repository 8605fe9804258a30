"""What convert.py writes of models of transformers is what it certified, wherever it is loaded and
however it is used; four of the architectures of tests/reloaded.py.

    python -m pytest tests/fold/test_reloaded.py
"""

import json

import pytest

pytest.importorskip("transformers")
from reloaded import TO, judge, outcomes

# What becomes of --to=rms, weightless and rescaled
EXPECTED = {
    "OPTForCausalLM": ("equal", "said", "refused"),
    "BertForMaskedLM": ("equal", "said", "refused"),
    "BartForConditionalGeneration": ("equal", "said", "refused"),
    "T5ForConditionalGeneration": ("refused", "said", "said"),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return outcomes([*EXPECTED], tmp_path_factory.mktemp("reloaded"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_written_folder_is_the_same_function_wherever_it_is_loaded(name, results):
    found = [results[name, to] for to in TO]
    assert tuple(outcome.word for outcome in found) == EXPECTED[name], found
    assert all(outcome.why for outcome in found if outcome.word == "refused")


def test_another_function_is_said_of_automodel_alone(tmp_path):
    """Else it is wrong, as nobody is told."""
    line = "AutoModel of this folder (OPTModel): ['last_hidden_state'] is another"
    for loader, told, word in (
        ("AutoModel", [line], "said"),
        ("AutoModel", [], "WRONG"),
        ("OPTForCausalLM", [line], "WRONG"),
    ):
        (tmp_path / "certificate.json").write_text(json.dumps({"not_covered": told}))
        outcome = judge("OPTForCausalLM", "rms", tmp_path, {loader: {"padding": 0.1}})
        assert outcome.word == word and f"{loader}, padding: off by" in outcome.why
