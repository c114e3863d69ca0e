"""Conversations to token ids by the tokenizer's own chat template. Knows nothing of files or models."""

from typing import Any

from jinja2 import TemplateError


def render_prompt(tokenizer: Any, messages: list[dict[str, str]], *, place: str = "conversation") -> list[int]:
    """Token ids of a conversation up to where the assistant begins to answer.

    Raises ValueError where the tokenizer (Transformers) has no chat template, and, naming `place`, where the template
    refuses the conversation (some allow no system turn, or two user turns in a row).
    """
    if tokenizer.chat_template is None:
        raise ValueError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; use an instruction-tuned verifier, "
            "or put a chat_template.jinja beside its tokenizer files"
        )
    try:
        # Transformers 5 returns a mapping, whatever `tokenize` suggests
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    except TemplateError as error:
        raise ValueError(
            f"{place}: the verifier's chat template refuses the conversation ({error}); change its turns or remove it"
        ) from error
    return list(rendered["input_ids"])
