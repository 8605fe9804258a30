"""Make transformers know coupled_gpt2, coupled_llama and coupled_qwen3 in this process.

    from hf.coupled import register
    register()
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("exported")    # what hf/weights.py wrote

The classes are in hf/modeling_coupled.py, which each exported folder carries too. With
trust_remote_code=True a folder is read without this repository; with `register()` it is read
without trust_remote_code.
"""

from common.hub import import_transformers


def register() -> None:
    """Register the coupled classes with transformers' Auto classes.

    It is a call, not a side effect of an import: an import hook that did it broke imports of
    transformers that were not complete yet (OPT's and BERT's first).
    """
    auto = import_transformers()
    # Only now, because it imports transformers.
    from hf.modeling_coupled import MODELS

    for model in MODELS:
        config = model.config_class
        auto.AutoConfig.register(config.model_type, config, exist_ok=True)
        auto.AutoModelForCausalLM.register(config, model, exist_ok=True)
