"""The model card of an exported drafter: README.md from its record. Knows dictionaries, no file."""

from collections.abc import Mapping
from typing import Any

from dflash.decoding.acceptance import CHAIN
from dflash.decoding.parity import UNCHECKED
from dflash.decoding.tables import NOT_MEASURED, Table, heading, markdown_table
from dflash.export.facts import is_hub_id

UNKNOWN = "not known"


def model_card(facts: Mapping[str, Any], *, kind: str, dtype: str) -> str:
    """Of `dflash.export.facts.facts_of`. What the record does not know is said to be unknown."""
    verifier, shape = facts["verifier"], facts["shape"]
    header = ["---", "library_name: dflash", "pipeline_tag: text-generation", "tags: [dflash, speculative-decoding]"]
    if is_hub_id(verifier["name"], verifier["revision"]):
        header.append(f"base_model: {verifier['name']}")
    last = "The output of the last layer, which is normed, is no tap."
    sections = [
        "\n".join([*header, "---"]),
        f"# DFlash drafter for {verifier['name']}",
        f"A drafter (arXiv 2602.06036) that proposes {shape['block_size'] - 1} tokens in one pass, from the hidden "
        f"states of its verifier, for speculative decoding. It gives no text of its own: embedding and LM head are the "
        f"verifier's.\n\n`provenance.json` beside this file is the record that it was written from; `SHA256SUMS` has "
        "the checksums.",
        markdown_table(
            Table(
                "Serving",
                ["what", "value"],
                [
                    ["format", kind],
                    ["weights", f"{dtype}, {_number(facts['parameters'])} parameters"],
                    ["block size", str(shape["block_size"])],
                    ["speculative tokens", str(shape["block_size"] - 1)],
                    ["mask token", str(shape["mask_token_id"])],
                    ["taps", ", ".join(map(str, shape["target_layer_ids"]))],
                    ["windows", _windows(shape)],
                ],
                f"Taps are 0-based decoder layers of the verifier whose output is taken: layer k is `hidden_states[k + "
                f"1]` of Transformers. {last} In the speculators format the same taps are called k + 1.",
            )
        ),
        markdown_table(
            Table(
                "Verifier",
                ["what", "value"],
                [
                    ["name", verifier["name"]],
                    ["revision", verifier["revision"] or UNKNOWN],
                    ["identity", verifier["identity"]],
                    ["precision", verifier["dtype"] or UNKNOWN],
                    ["layers, hidden size, vocabulary", _size(verifier)],
                    *_chat(facts["chat"]),
                ],
                "The identity is a hash of weights, configuration, tokenizer and chat template. With another verifier, "
                "template, thinking mode or precision the acceptance length is another one.",
            )
        ),
        _data(facts["data"]),
        _training(facts["training"]),
        _evaluation(facts["evaluation"]),
        "## Licence\n\nOf the data: see the table above, where it is known. The answers in it are the verifier's: its "
        "licence applies to them, and is not recorded here. No licence of the drafter itself is recorded.",
        "## Versions\n\n" + ", ".join(f"{name} {number}" for name, number in facts["versions"].items()) + "; stages "
        f"{', '.join(f'{stage} {number}' for stage, number in facts['stages'].items())}. Made {facts['made']} as "
        f"`{facts['drafter']}`.",
    ]
    return "\n\n".join(sections) + "\n"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _size(verifier: Mapping[str, Any]) -> str:
    return f"{verifier['num_layers']}, {verifier['hidden_size']:,}, {verifier['vocab_size']:,}"


def _windows(shape: Mapping[str, Any]) -> str:
    kinds = shape["layer_types"]
    return f"{shape['sliding_window']} tokens: {', '.join(kinds)}" if "sliding_attention" in kinds else "none"


def _chat(chat: Mapping[str, Any] | None) -> list[list[str]]:
    if not chat:
        return [["chat template", UNKNOWN], ["thinking", UNKNOWN]]
    variables = dict(chat["options"]["variables"])
    thinking = {True: "on", False: "off"}.get(variables.pop("enable_thinking", None), "left to the template")
    return [
        ["chat template (SHA-256)", chat["template_sha256"]],
        ["thinking", thinking],
        ["system prompt", chat["options"]["system_prompt"] or "none"],
        *([["template variables", str(variables)]] if variables else []),
    ]


def _data(data: Mapping[str, Any] | None) -> str:
    if not data or not data["sources"]:
        return f"## Data\n\nWhat it was trained on is {UNKNOWN}."
    rows = [
        [source["name"], _number(source["rows_in"]), _number(source["rows"]), source["licence"] or UNKNOWN]
        for source in data["sources"]
    ]
    answers, corpus = data["answers"], data["corpus"]
    said = []
    if answers:
        how = "greedily" if not answers["temperature"] else f"sampled at temperature {answers['temperature']:g}"
        limit = f"at most {answers['max_new_tokens']:,} tokens each"
        said.append(f"The verifier answered them {how}, {limit}: {_number(answers['tokens'])} tokens.")
    if corpus:
        splits = ", ".join(f"{count:,} {split}" for split, count in corpus["splits"].items())
        said.append(
            f"Corpus: {corpus['rows']:,} rows ({splits}), {corpus['tokens']:,} tokens, of which "
            f"{corpus['supervised']:,} are supervised."
        )
    return markdown_table(Table("Data", ["source", "rows", "used", "licence"], rows, " ".join(said)))


def _training(training: Mapping[str, Any] | None) -> str:
    if not training:
        return f"## Training\n\nHow it was trained is {UNKNOWN}."
    share = training["on_policy_share"]
    best = training["best"] or {}
    said = (
        f"{_number(training['rows'])} rows, {_number(training['steps'])} steps, {_number(training['tokens'])} tokens; "
        f"share of tokens that are the verifier's own choice: {UNKNOWN if share is None else f'{share:.1%}'}. "
        f"Published is step {_number(best.get('step'))}: {best.get('reason', UNKNOWN)}."
    )
    rows = [[name, str(value)] for name, value in training["config"].items()]
    return markdown_table(Table("Training", ["setting", "value"], rows, said))


def _evaluation(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return "## Evaluation\n\nIt was not evaluated."
    methods = evaluation["methods"]

    def cell(numbers: Mapping[str, Any], method: str) -> str:
        length, interval = numbers["acceptance_length"][method], numbers["interval"][method]
        if length is None:
            return NOT_MEASURED
        return f"{length:.2f}" + (f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else "")

    rows = [
        [name, *(cell(numbers, m) for m in methods), f"{numbers['rounds'][CHAIN]:,}", f"{numbers['responses']:,}"]
        for name, numbers in evaluation["categories"].items()
    ]
    weak, parity = evaluation["weak"], evaluation["parity"]
    same = (
        "as the process that evaluated it" if evaluation.get("parity_reference") == "evaluation" else "as in training"
    )
    temperature = evaluation.get("temperature", 0)
    other = evaluation.get("parity_report", evaluation["report"])
    said = [
        "Acceptance length, 1 + accepted / rounds, with its 95 % interval. A round is one draft and one verification; "
        "engines draft the chain, tree N needs an engine that verifies trees.",
        *([f"The verifier's answers were drawn at temperature {temperature:g}."] if temperature else []),
        f"Weak: {', '.join(weak)} (their interval of the chain lies below the number of all responses)."
        if weak
        else "Weak: no category's interval of the chain lies below the number of all responses.",
        f"A process of its own, given the folder, drafted {parity['agreement']:.1%} of {parity['compared']:,} tokens "
        f"{same}{'' if other == evaluation['report'] else f' (report `{other}`)'}."
        if parity and parity["compared"]
        else UNCHECKED,
        *_cast(evaluation),
        *(note for note in evaluation["notes"] if note != UNCHECKED),
        f"Report: `{evaluation['report']}`.",
    ]
    header = ["category", *map(heading, methods), "rounds (chain)", "responses"]
    return markdown_table(Table("Evaluation", header, rows, " ".join(said)))


def _cast(evaluation: Mapping[str, Any]) -> list[str]:
    """What table and gate are of, where that is not what is in the folder. Evaluation casts to the verifier's dtype."""
    casts, run = evaluation.get("casts"), (evaluation["conditions"] or {}).get("dtype")
    if not casts:
        return []
    measured = "which comes to the same" if casts == [run] else "which were not measured"
    return [
        f"All this is of weights in {evaluation.get('weights', UNKNOWN)}, run in {run or UNKNOWN}; here they are cast "
        f"to {', then to '.join(casts)}, {measured}."
    ]
