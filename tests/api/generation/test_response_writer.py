"""What responses of all APIs share: how log-probabilities are written, sequences that end early, the best of several."""

import math

import pytest
from asked import encode_json, prepared, serving

from api.generation.prepared_request import TokenizedPrompt
from api.generation.response_writer import GeneratedSequence, rounded
from protocol import Token


def sequence(number=0, **fields):
    asked = prepared("completion", **fields)
    return GeneratedSequence(serving().text.tokenizer, TokenizedPrompt(asked, [72, 105], 9), number, number)


@pytest.mark.parametrize(
    ("logprob", "written"),
    [
        (-0.3400000035762787, b"-0.34"),
        (-16.777217864990234, b"-16.7772179"),
        (-1.1920929e-7, b"-1e-7"),
        (-1e-9, b"0.0"),
        (math.nan, b"null"),
        (-math.inf, b"null"),
    ],
)
def test_a_logprob_is_written_with_seven_decimals_and_as_null_where_it_is_no_number(logprob, written):
    assert encode_json(rounded(logprob)) == written


def test_a_sequence_that_is_cut_gives_what_was_held_back_for_a_stop_string():
    cut = sequence(stop="bcd")
    told = [piece for token in serving().text.tokenizer.encode("abc") for piece in cut.take(Token(1, token, -1.0))]
    assert "".join(piece.text for piece in told) == "a"
    assert "".join(piece.text for piece in cut.truncate()) == "bc"
    assert (cut.finish_reason, cut.stream.text) == ("length", "abc")
