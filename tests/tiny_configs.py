"""Keys of configs of transformers for models of some hundred weights."""

WORDS = dict(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=2)
SIZE = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24)
OPT = dict(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    ffn_dim=24,
    word_embed_proj_dim=16,
    max_position_embeddings=32,
    **WORDS,
)
# BART and its kind
ENCODER_DECODER = dict(
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    **WORDS,
)
T5 = dict(
    d_model=16,
    d_kv=8,
    d_ff=24,
    num_layers=1,
    num_heads=2,
    decoder_start_token_id=0,
    tie_word_embeddings=True,
    **WORDS,
)
