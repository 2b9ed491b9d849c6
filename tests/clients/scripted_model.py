"""Makes a model that answers as a script says, has a large window and costs next to nothing.

    SERVER_PYTHON scripted_model.py FOLDER TOKENIZER SCRIPT [WORD]

With WORD, a word of the script, the model reads images (as LLaVA 1.5 does): each of an image's tokens is to it as this word.
TOKENIZER is a folder of a published tokenizer, with its chat template. SCRIPT is JSON: [["", text], [word, text], ...]. The
model says the text of the last word of the list that stands somewhere in the prompt, the first text where none does.

The words and the pieces of the texts are tokens of their own. The attention finds the strongest word of the prompt; the
embedding of a token tells its place in the texts; from both the head reads the token that follows.
"""

import json
import math
import re
import sys
from itertools import chain, pairwise
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))
from vision_models import llava

WINDOW = 65536
PIECE = 6  # characters of a token of a text
HEADS = 4
# Weights of the head: the model is sure, also where tokens are sampled.
FOLLOWS, FOUND, BEGINS = 40.0, 20.0, 10.0
STRONGER = 40.0  # a word's score in the attention, above that of all words before it and of 65,536 other tokens
IMAGE = "<image>"
# Makes a template of texts write images, too.
PARTS = """{%- macro text(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}\
{{ '<image>\n' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{%- endmacro %}"""
NO_TURN = 1e12  # base of the rotary embedding: the last dimension of a head stays as it is at every position


def main(folder, tokenizer_folder, script, image_word=""):
    folder.mkdir()
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    settings = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())
    texts = [_pieces(text, tokenizer) for _, text in script]
    words = [word for word, _ in script[1:]]
    for new in [*words, *chain.from_iterable(texts)]:
        if tokenizer.token_to_id(new) is None:
            tokenizer.add_tokens([AddedToken(new, normalized=False)])
    if image_word:
        tokenizer.add_special_tokens([AddedToken(IMAGE, normalized=False)])
        settings["chat_template"] = PARTS + re.sub(
            r"(\+ |{- )message\.content", r"\1text(message.content)", settings["chat_template"]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    end = settings["eos_token"]
    end_id = tokenizer.token_to_id(end["content"] if isinstance(end, dict) else end)
    answers = [[tokenizer.token_to_id(piece) for piece in text] + [end_id] for text in texts]
    word_ids = [tokenizer.token_to_id(word) for word in words]
    model = _model(tokenizer.get_vocab_size(), answers, word_ids)
    if image_word:
        model = _reading_images(model, tokenizer.token_to_id(IMAGE), tokenizer.token_to_id(image_word), folder)
    model.save_pretrained(folder)


def _pieces(text, tokenizer):
    """The marks of a call stay the tokens that they are."""
    marks = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    mark = next((mark for mark in marks if text.startswith(mark)), "")
    rest = text.removeprefix(mark)
    pieces = [mark] * bool(mark) + [rest[at : at + PIECE] for at in range(0, len(rest), PIECE)]
    assert len(set(pieces)) == len(pieces), f"a piece is in a text twice: {pieces}"
    return pieces


def _model(vocab_size, answers, words):
    place = {token: i for i, token in enumerate(dict.fromkeys(token for answer in answers for token in answer[:-1]))}
    found = len(place)  # and the dimensions behind it: the word that the attention has found
    other = found + len(words)
    always = other + 1
    hidden_size = math.ceil((always + 1) / 64) * 64
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        max_position_embeddings=WINDOW,
        rope_theta=NO_TURN,
        bos_token_id=None,
        eos_token_id=answers[0][-1],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    attention = model.model.layers[0].self_attn
    head_size = hidden_size // HEADS
    # What the norm makes of a one in an embedding: two of a token's dimensions are one, three of a word's.
    of_token, of_word = math.sqrt(hidden_size / 2), math.sqrt(hidden_size / 3)
    with torch.no_grad():
        for parameter in [*attention.parameters(), *model.model.layers[0].mlp.parameters()]:
            parameter.zero_()
        embedding = model.model.embed_tokens.weight.zero_()
        embedding[:, other] = 1
        embedding[:, always] = 1
        for token, dimension in place.items():
            embedding[token, other] = 0
            embedding[token, dimension] = 1
        still = head_size - 1
        attention.q_proj.weight[still, always] = math.sqrt(head_size) / of_token / of_word
        for i, word in enumerate(words):
            embedding[word, found + i] = 1
            attention.k_proj.weight[still, found + i] = STRONGER * (i + 1)
            attention.v_proj.weight[i, found + i] = 1 / of_word
            attention.o_proj.weight[found + i, i] = 1
        head = model.lm_head.weight.zero_()
        head[answers[0][0], other] = BEGINS
        for i, answer in enumerate(answers[1:]):
            head[answer, found + i] = BEGINS  # where a piece is in several texts, the word says which goes on
            head[answer[0], found + i] = FOUND
        for answer in answers:
            for token, following in pairwise(answer):
                head[following, place[token]] = FOLLOWS
    return model


def _reading_images(text, image_token, image_word, folder):
    """The model with a tower whose projector makes the same of every image; the files of its preprocessing into `folder`."""
    family = llava()
    (folder / "preprocessor_config.json").write_text(json.dumps(family.preprocessor))
    (folder / "processor_config.json").write_text(json.dumps(family.processor))
    config = LlavaConfig(vision_config=family.config["vision_config"], text_config=text.config, image_token_index=image_token)
    config.eos_token_id = text.config.eos_token_id
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    with torch.no_grad():
        for parameter in model.model.multi_modal_projector.parameters():
            parameter.zero_()
        model.model.multi_modal_projector.linear_2.bias.copy_(text.model.embed_tokens.weight[image_word])
    return model


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:])
