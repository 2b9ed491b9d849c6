"""Makes a model that answers every prompt with one text, has a large window and costs next to nothing.

    SERVER_PYTHON scripted_model.py FOLDER TOKENIZER TEXT     the tokenizer is a folder, with a chat template

A token leads to the next one of the text, any other token to the first: the layers add nothing, and the embedding of a token
is its place in the text. So no token may be in the text twice.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 65536
SURE = 10.0  # of the next token, also where tokens are sampled


def main(folder, tokenizer_folder, text):
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_folder / name, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = json.loads((folder / "tokenizer_config.json").read_text())["eos_token"]
    script = [*tokenizer.encode(text, add_special_tokens=False).ids, tokenizer.token_to_id(end)]
    assert len(set(script)) == len(script) < 64, "a token is in the text twice"
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=WINDOW,
        bos_token_id=None,
        eos_token_id=script[-1],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        embedding = model.model.embed_tokens.weight.zero_()
        embedding[:, 0] = 1
        head = model.lm_head.weight.zero_()
        for place, token in enumerate(script):
            embedding[token] = 0
            embedding[token, place + 1] = 1
            head[token, place] = SURE
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
