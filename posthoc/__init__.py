"""CoupledNorm in a model that is trained already: what to couple, adapters, text, teacher and student."""
