"""Evaluation stage: acceptance length of chain and trees by replay, cross-checked by live decoding of a few prompts.

Hidden states, drafter and verifier in, a report out. Knows no Zarr, no tree and no table.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from dflash.config import EvaluationConfig
from dflash.decoding.acceptance import CHAIN, method_name
from dflash.decoding.live import Method, decode
from dflash.decoding.page import write_report
from dflash.decoding.replay import replay, response_span
from dflash.decoding.report import assemble
from dflash.decoding.responses import Response, content_hash
from dflash.devices import resolve_device
from dflash.drafter.export import load_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import HiddenStates, RowStates
from dflash.keys import evaluation_key
from dflash.manifests import Artifact, Progress, publish, silent
from dflash.pinning import PinnedVerifier
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)

SET = "evaluation"  # the name of the one set
SEED = 0  # of the bootstrap


def evaluate(
    config: EvaluationConfig,
    drafter: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    *,
    progress: Progress = silent,
) -> Artifact:
    """Replay every row; decode the first `live_prompts` rows, spread over the categories, live as well.

    Raises ValueError where drafter, hidden states and verifier do not belong together, and AssertionError where live
    decoding in float32 gives another text than the verifier gave alone, which no drafter may ever cause.
    """
    store = HiddenStates.open(hidden_states.path)
    device, dtype = resolve_device(verifier.device), getattr(torch, verifier.dtype)
    model = load_drafter(drafter.path, dtype=dtype, device=device)
    _check_match(drafter, model, store.info, verifier)
    ends = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"])
    live_rows = spread([row.category for row in store.rows], config.live_prompts)
    live_verifier = load_verifier(verifier) if live_rows else None

    asked = store.info["on_policy_share"] is not None  # whether the verifier said what it would say
    responses: list[Response] = []
    runs: list[dict[str, Any]] = []
    for number, row in enumerate(store.rows):
        states = store.read(number)
        rounds = replay(model, ends, states, budgets=config.budgets)
        first, end = response_span(states.loss_mask_T)
        ids_T = states.input_ids_T[:end]
        responses.append(
            Response(
                id=row.id,
                set=SET,
                category=row.category,
                content=content_hash(ids_T[:first].tolist(), ids_T[first:].tolist()),
                num_tokens=end - first,
                truncated=int(ids_T[-1]) not in verifier.special_ids["eos"],
                num_on_policy=int((ids_T[first:] == states.greedy_ids_T[first - 1 : end - 1]).sum()) if asked else None,
                accepted={method: tuple(accepted) for method, accepted in rounds.items()},
            )
        )
        if live_verifier and number in live_rows:
            checked = cross_check(
                live_verifier,
                model,
                ends,
                states,
                rounds,
                name=row.id,
                layers=store.info["target_layer_ids"],
                budget=max(config.budgets),
                storage_dtype=store.info["storage_dtype"],
            )
            runs += [{"id": row.id, "category": row.category} | run for run in checked]
        progress(number + 1, len(store.rows), f"{number + 1:,} of {len(store.rows):,} responses")

    report = assemble(
        responses,
        drafter=drafter.key,
        verifier={"name": verifier.name, "identity": verifier.identity, "dtype": verifier.dtype},
        hidden_states={SET: hidden_states.key},
        conditions={
            "template": verifier.tokenizer_identity,
            "thinking": verifier.chat.variables.get("enable_thinking"),
        },
        num_slots=model.config.block_size - 1,
        seed=SEED,
        live={
            "prompts": len(live_rows),
            "text_equal": all(run["text_equal"] for run in runs) if runs else None,
            "rounds_equal": all(run["rounds_equal"] for run in runs) if runs else None,
            "runs": runs,
        },
    )
    summary = {
        "responses": report["overall"]["responses"],
        "tokens": report["overall"]["tokens"],
        "rounds": report["overall"]["rounds"],
        "acceptance_length": report["acceptance_length"],
        "live": {name: value for name, value in report["live"].items() if name != "runs"},
    }
    with publish(evaluation_key(config, drafter, hidden_states, verifier), summary=summary) as (folder, artifact):
        write_report(folder, report, responses)
    log.info("%(responses)d responses, rounds %(rounds)s, acceptance length %(acceptance_length)s", summary)
    return artifact()


def _check_match(drafter: Artifact, model: Drafter, info: dict[str, Any], verifier: PinnedVerifier) -> None:
    """Raises ValueError naming both sides where drafter, hidden states and verifier do not belong together."""
    states, shape = info["verifier"], model.config
    trained_on = drafter.summary["verifier"]
    if (states["identity"], states["dtype"]) != (verifier.identity, verifier.dtype):
        raise ValueError(
            f"evaluation: the hidden states are of verifier {states['name']} ({states['identity'][:8]}, "
            f"{states['dtype']}), not of {verifier}; extract them again"
        )
    if trained_on["identity"] != verifier.identity:
        raise ValueError(
            f"evaluation: drafter {drafter.key} was trained for verifier {trained_on['name']} "
            f"({trained_on['identity'][:8]}), not for {verifier}; train one for it"
        )
    for name, ours, theirs in (
        ("hidden size", shape.hidden_size, info["hidden_size"]),
        ("tap layers", list(shape.target_layer_ids), info["target_layer_ids"]),
        ("number of verifier layers", shape.num_target_layers, info["num_target_layers"]),
    ):
        if ours != theirs:
            raise ValueError(
                f"evaluation: drafter {drafter.key} has {name} {ours}, the hidden states have {theirs}; "
                "train the drafter on hidden states extracted in the same way"
            )


def spread(categories: Sequence[str], count: int) -> list[int]:
    """The numbers of the first `count` rows taken in turn from each category (in the order they appear)."""
    turns: dict[str, int] = defaultdict(int)
    order = []
    for number, category in enumerate(categories):
        order.append((turns[category], list(turns).index(category), number))
        turns[category] += 1
    return [number for _, _, number in sorted(order)[:count]]


def cross_check(
    verifier: Verifier,
    drafter: Drafter,
    ends: Ends,
    states: RowStates,
    rounds: dict[str, list[int]],
    *,
    name: str,
    layers: Sequence[int],
    budget: int,
    storage_dtype: str,
) -> list[dict[str, Any]]:
    """Decode a row's prompt live with the chain and, where the verifier can, one tree; compare with replay.

    The response's own length is the length limit: it ended there, by itself or because of the limit it was made under.
    Raises AssertionError naming the row where the text differs in float32.
    """
    first, end = response_span(states.loss_mask_T)
    prompt, response = states.input_ids_T[:first].tolist(), states.input_ids_T[first:end].tolist()
    runs = []
    methods: dict[str, Method] = {CHAIN: "chain"}
    if not verifier.has_running_state:
        methods[method_name(budget)] = budget
    for method_label, method in methods.items():
        out = decode(
            verifier,
            drafter,
            ends,
            prompt,
            layers=layers,
            max_new_tokens=len(response),
            method=method,
            storage_dtype=storage_dtype,
        )
        text_equal, rounds_equal = out.ids == response, out.accepted == rounds[method_label]
        if not text_equal and verifier.dtype == torch.float32:
            same = [a == b for a, b in zip(out.ids, response, strict=False)]
            at = [*same, False].index(False)
            raise AssertionError(  # ours, and the same each time: not worth a retry
                f"prompt {name}: live decoding ({method_label}) left the verifier's own text at response token "
                f"{at} of {len(response)}; this is a bug in live decoding or in how the response was made"
            )
        if not (text_equal and rounds_equal):
            log.warning(
                "prompt %s, %s: text %s, %d rounds accepting %d live, %d accepting %d in replay",
                name,
                method_label,
                "equal" if text_equal else "differs",
                len(out.accepted),
                sum(out.accepted),
                len(rounds[method_label]),
                sum(rounds[method_label]),
            )
        runs.append(
            {
                "method": method_label,
                "tokens": len(out.ids),
                "rounds": len(out.accepted),
                "accepted": sum(out.accepted),
                "text_equal": text_equal,
                "rounds_equal": rounds_equal,
            }
        )
    return runs
