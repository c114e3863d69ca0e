import copy

import pytest
from transformers import PreTrainedTokenizerFast

from dflash.corpus.chat import render_prompt


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: PreTrainedTokenizerFast):
    ids = render_prompt(tokenizer, [{"role": "user", "content": "How many apples?"}])
    assert tokenizer.decode(ids) == "<|start|>user\nHow many apples?<|end|><|start|>assistant\n"
    assert all(type(token) is int for token in ids)


def test_a_tokenizer_without_template_is_refused(tokenizer: PreTrainedTokenizerFast):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match="tiny: the tokenizer has no chat template; use an instruction-tuned"):
        render_prompt(bare, [{"role": "user", "content": "How many?"}])


def test_a_conversation_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerFast):
    messages = [{"role": role, "content": "Hi"} for role in ("user", "system", "user")]
    with pytest.raises(ValueError, match=r"a.jsonl:7: the verifier's chat template refuses .*\(system must come first"):
        render_prompt(tokenizer, messages, place="a.jsonl:7")
