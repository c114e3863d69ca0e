"""Evaluation stage: replay of every response, the parity gate, a few prompts decoded live, and the report of all that.

Hidden states, drafter and verifier in, a report out. Knows no Zarr, no tree and no table, and not who the champion is.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from dflash.config import EvaluationConfig
from dflash.corpus.chat import load_chat
from dflash.corpus.records import Sampling
from dflash.decoding import provenance
from dflash.decoding.acceptance import CHAIN, method_name, usual_budget
from dflash.decoding.adviser import Costs
from dflash.decoding.history import read_history, series
from dflash.decoding.live import PLAIN, Decoded, Measured, Method, Step, measure
from dflash.decoding.near_ties import NEAR_TIE, divergence
from dflash.decoding.page import write_report
from dflash.decoding.parity import REFERENCE, UNCHECKED, Parity, ask, check, remember
from dflash.decoding.replay import replay_responses, response_span
from dflash.decoding.report import assemble
from dflash.decoding.responses import Response, content_hash
from dflash.decoding.statistics import SEED
from dflash.decoding.worst import worst_cases
from dflash.devices import give_back, resolve_device
from dflash.drafter.export import load_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.hidden.store import HiddenStates, RowStates
from dflash.keys import evaluation_key
from dflash.lineage import lineage
from dflash.manifests import Artifact, Manifest, Progress, load_manifest, publish, silent
from dflash.pinning import PinnedVerifier, num_tokens
from dflash.verifier import Verifier, load_verifier

log = logging.getLogger(__name__)

SET = "evaluation"  # the set of categories that are in no other
PARITY_ROWS = 4
TIMED: tuple[Step, ...] = ("draft", "tree", "verify", "commit")  # reading the prompt is no decoding


def possible_budgets(budgets: Sequence[int], *, vocab_size: int, num_slots: int) -> list[int]:
    """Those with fewer nodes than there are prefixes. At least one is left, which then is the whole tree's."""
    most = sum(vocab_size**depth for depth in range(1, num_slots + 1))
    return [budget for budget in budgets if budget <= most] or [most]


def evaluate(
    config: EvaluationConfig,
    drafter: Artifact,
    hidden_states: Artifact,
    verifier: PinnedVerifier,
    *,
    progress: Progress = silent,
) -> Artifact:
    """Replay every row; decode the first `live_prompts` rows, spread over the categories, live as well.

    Raises ValueError where drafter, hidden states and verifier do not belong together, where the drafter is not what
    was trained (the parity gate) and where the history is damaged; AssertionError where live decoding in float32 gives
    another text than the verifier gave alone and no near-tie explains it, which no drafter may ever cause.
    """
    history = read_history(verifier.identity)
    store = HiddenStates.open(hidden_states.path)
    trained = load_manifest(drafter.path)
    device, dtype = resolve_device(verifier.device), getattr(torch, verifier.dtype)
    model = load_drafter(drafter.path, dtype=dtype, device=device)
    _check_match(trained, model, store.info, verifier)
    ends = Ends(store.frozen(), dtype=dtype, device=device, **store.info["logits"])
    ends = ends.for_drafter(model, num_tokens=num_tokens(verifier))
    num_slots = model.config.block_size - 1
    budgets = possible_budgets(config.budgets, vocab_size=ends.draft_vocab_size, num_slots=num_slots)
    if budgets != config.budgets:
        log.warning("budgets %s of %s: a block has no more prefixes", budgets, config.budgets)

    answers: list[Answer] = []

    def rows() -> Iterator[RowStates]:
        for number in range(len(store.rows)):
            states = store.read(number)
            answers.append(_answer(states))
            yield states

    names = [row.id for row in store.rows]
    responses: list[Response] = []
    # what rejection sampling expects takes the verifier's distribution
    temperature = config.temperature if store.info["store_final"] else 0.0
    for replayed in replay_responses(model, ends, rows(), budgets=budgets, temperature=temperature, names=names):
        row, answer = store.rows[len(responses)], answers[len(responses)]
        responses.append(
            Response(
                id=row.id,
                set=set_of(row.category, config.sets),
                category=row.category,
                content=content_hash(answer.prompt_ids, answer.ids),
                num_tokens=len(answer.ids),
                truncated=answer.ids[-1] not in verifier.special_ids["eos"],
                accepted={method: tuple(accepted) for method, accepted in replayed.accepted.items()},
                expected={method: tuple(expected) for method, expected in replayed.expected.items()},
                chain_at=tuple(replayed.accepted_at[CHAIN]),
                recall_hits=replayed.recall_hits,
                recall_slots=replayed.recall_slots,
                # only where the verifier said what it would say
                num_on_policy=None if store.info["on_policy_share"] is None else answer.num_on_policy,
                rejection=replayed.rejection,
            )
        )
        progress(len(responses), len(names), f"{len(responses):,} of {len(names):,} responses")

    parity = None
    if config.parity == "on":
        parity = _parity(drafter, model, ends, store, verifier, budget=usual_budget(budgets))
    live_rows = spread([row.category for row in store.rows], config.live_prompts)
    live, measured = _decode_live(
        model,
        ends,
        store,
        verifier,
        budgets=budgets,
        asked=[(responses[number], answers[number]) for number in live_rows],
        sampling=Sampling(config.max_new_tokens, temperature=config.temperature, seed=config.seed),
    )
    give_back()  # the verifier's memory, which training and the parity gate of another drafter may want

    made = lineage()
    evaluated_under = provenance.conditions(made, hidden_states.identity, dtype=verifier.dtype, chat=store.info["chat"])
    trained_on = trained.inputs.get("hidden_states", "")  # an imported drafter has none
    trained_under = provenance.conditions(
        made, trained_on, dtype=trained.summary["verifier"]["dtype"], chat=trained.summary.get("chat", {})
    )
    overlap = provenance.overlap(made, trained_on, [answer.prompt_ids for answer in answers])
    warnings = provenance.differences(trained_under, evaluated_under)
    if overlap:
        warnings.append(
            f"{overlap:,} of {len(answers):,} prompts are in the training data: there it is learned by heart."
        )
    if not (parity and parity.compared):
        warnings.append(UNCHECKED)
    for warning in warnings:
        log.warning("%s", warning)

    by_id = dict(zip(names, answers, strict=True))
    decode_text = load_chat(verifier).tokenizer.decode
    report = assemble(
        responses,
        drafter=drafter.key,
        verifier={"name": verifier.name, "identity": verifier.identity, "dtype": verifier.dtype},
        hidden_states=dict.fromkeys(sorted({response.set for response in responses}), hidden_states.key),
        conditions={
            "template": verifier.tokenizer_identity,
            "thinking": provenance.thinking(verifier.chat.variables),
            "temperature": config.temperature,
        },
        num_slots=num_slots,
        seed=SEED,
        live=live,
        costs=_costs(config, measured, num_slots=num_slots),
        worst=worst_cases(
            responses,
            method=CHAIN,
            num_slots=num_slots,
            prompt=lambda response: decode_text(by_id[response.id].prompt_ids),
            text=lambda response, start, end: decode_text(by_id[response.id].ids[start:end]),
        ),
        trained={"rows": trained.summary.get("rows"), "overlap": overlap, "conditions": trained_under},
        evaluated=evaluated_under,
        parity=parity._asdict() if parity else None,
        warnings=warnings,
    )
    summary = {
        "responses": report["overall"]["responses"],
        "tokens": report["overall"]["tokens"],
        "rounds": report["overall"]["rounds"],
        "acceptance_length": report["acceptance_length"],
        "parity": report["parity"],
        "live": {name: value for name, value in report["live"].items() if name not in ("runs", "timing")},
        "warnings": warnings,
    }
    key = evaluation_key(config, drafter, hidden_states, verifier)
    past = series(history.filter(history["report"] != str(key)), like=report)
    now = datetime.now(UTC)
    for method, length in report["acceptance_length"].items():
        past.setdefault(method, []).append((now, length))
    with publish(key, summary=summary) as (folder, artifact):
        write_report(folder, report, responses, history=past)
    log.info("%(responses)d responses, rounds %(rounds)s, acceptance length %(acceptance_length)s", summary)
    return artifact()


class Answer(NamedTuple):
    """The response that a row is replayed for, as token ids; `num_on_policy` are the verifier's own greedy choice."""

    prompt_ids: list[int]
    ids: list[int]
    num_on_policy: int


def _answer(states: RowStates) -> Answer:
    first, end = response_span(states.loss_mask_T)
    ids_T = states.input_ids_T[first:end]
    num_on_policy = int((ids_T == states.greedy_ids_T[first - 1 : end - 1]).sum())
    return Answer(states.input_ids_T[:first].tolist(), ids_T.tolist(), num_on_policy)


def set_of(category: str, sets: Mapping[str, Sequence[str]]) -> str:
    """The set that names the category."""
    return next((name for name, categories in sets.items() if category in categories), SET)


def _check_match(trained: Manifest, model: Drafter, info: dict[str, Any], verifier: PinnedVerifier) -> None:
    """Raises ValueError naming both sides where drafter, hidden states and verifier do not belong together."""
    states, shape, trained_for = info["verifier"], model.config, trained.summary["verifier"]
    if (states["identity"], states["dtype"]) != (verifier.identity, verifier.dtype):
        raise ValueError(
            f"evaluation: the hidden states are of verifier {states['name']} ({states['identity'][:8]}, "
            f"{states['dtype']}), not of {verifier}; extract them again"
        )
    if trained_for["identity"] != verifier.identity:
        raise ValueError(
            f"evaluation: drafter {trained.key} was trained for verifier {trained_for['name']} "
            f"({trained_for['identity'][:8]}), not for {verifier}; train one for it"
        )
    if shape.block_size > trained.config["block_size"]:
        raise ValueError(
            f"evaluation: {trained.path / 'config.json'} asks for blocks of {shape.block_size}, but the drafter was "
            f"trained with {trained.config['block_size']}; put that back, or train with larger blocks"
        )
    for name, ours, theirs in (
        ("hidden size", shape.verifier_hidden_size, info["hidden_size"]),
        ("vocabulary", shape.vocab_size, verifier.vocab_size),
        ("tap layers", list(shape.target_layer_ids), info["target_layer_ids"]),
        ("number of verifier layers", shape.num_target_layers, info["num_target_layers"]),
    ):
        if ours != theirs:
            raise ValueError(
                f"evaluation: drafter {trained.key} has {name} {ours}, the hidden states have {theirs}; "
                "train the drafter on hidden states extracted in the same way"
            )


def _parity(
    drafter: Artifact, model: Drafter, ends: Ends, store: HiddenStates, verifier: PinnedVerifier, *, budget: int
) -> Parity | None:
    """What another process makes of the drafter's folder; None where there is no anchor to try it on. Raises ValueError
    with the diagnosis where that is something else than in training (or, if it was not trained here, than in replay).
    """
    with TemporaryDirectory() as folder:
        reference, request = drafter.path / REFERENCE, Path(folder) / "request.json"
        if not reference.exists():
            reference = Path(folder) / REFERENCE
            rows = (store.read(number) for number, row in enumerate(store.rows) if row.num_supervised > 1)
            remember(
                reference,
                drafter=model,
                ends=ends,
                rows=list(islice(rows, PARITY_ROWS)),
                storage_dtype=store.info["storage_dtype"],
            )
        if not reference.exists():
            return None
        ask(request, drafter.path, reference=reference, verifier=verifier, budget=budget)
        parity = check(request)
    log.info("parity: %.1f%% of %d drafts, and %d live rounds, are the same", 100 * parity.agreement, *parity[1:3])
    return parity


def spread(categories: Sequence[str], count: int) -> list[int]:
    """The numbers of the first `count` rows taken in turn from each category (in the order they appear)."""
    turns: dict[str, int] = defaultdict(int)
    order = []
    for number, category in enumerate(categories):
        order.append((turns[category], list(turns).index(category), number))
        turns[category] += 1
    return [number for _, _, number in sorted(order)[:count]]


def _decode_live(
    model: Drafter,
    ends: Ends,
    store: HiddenStates,
    verifier: PinnedVerifier,
    *,
    budgets: Sequence[int],
    asked: Sequence[tuple[Response, Answer]],
    sampling: Sampling,
) -> tuple[dict[str, Any], list[Measured]]:
    """Decode prompts with the chain and, where the verifier can, some trees; compare with replay. The report's section
    on that, and what was measured.

    The response's own length is the length limit: it ended there, by itself or because of the limit it was made under.
    """
    nothing: dict[str, Any] = {
        "prompts": 0,
        "text_equal": None,
        "near_ties": None,
        "rounds_equal": None,
        "runs": [],
    }
    if not asked:
        return nothing, []
    loaded = load_verifier(verifier)
    methods: dict[str, Method] = {CHAIN: "chain"}
    if not loaded.has_running_state:
        some = sorted({min(budgets), usual_budget(budgets), max(budgets)})
        methods |= {method_name(budget): budget for budget in some}
    measured = measure(
        loaded,
        model,
        ends,
        [answer.prompt_ids for _, answer in asked],
        methods=list(methods.values()),
        layers=store.info["target_layer_ids"],
        max_new_tokens=[len(answer.ids) for _, answer in asked],
        storage_dtype=store.info["storage_dtype"],
        temperature=sampling.temperature,
        seeds=[sampling.seed_of(response.request) for response, _ in asked],
    )
    by_name = dict(zip([PLAIN, *methods], measured, strict=True))
    runs = [
        _compared(loaded, response, answer, decoded, method=method, dtype=verifier.dtype, sampling=sampling)
        for number, (response, answer) in enumerate(asked)
        for method, decoded in ((name, one.responses[number]) for name, one in by_name.items() if name != PLAIN)
    ]
    of_equal_text = [run["rounds_equal"] for run in runs if run["text_equal"]]
    return {
        "prompts": len(asked),
        "text_equal": all(run["text_equal"] for run in runs),
        "near_ties": sum(run["near_tie"] for run in runs),
        "rounds_equal": all(of_equal_text) if of_equal_text else None,
        "runs": runs,
        "timing": {
            name: {
                "tokens": one.tokens,
                "passes": one.calls - len(one.responses),
                "seconds": {step: one.seconds[step] for step in TIMED},
            }
            for name, one in by_name.items()
            if one.rounds
        },
    }, measured


def _compared(
    verifier: Verifier,
    response: Response,
    answer: Answer,
    decoded: Decoded,
    *,
    method: str,
    dtype: str,
    sampling: Sampling,
) -> dict[str, Any]:
    """One run of live decoding against replay. Raises AssertionError where the text differs in float32 for another
    reason than a near-tie: the response was made in a batch, whose sums round otherwise. Of drawn texts none is an
    error: where another engine drew them, with other random numbers, they have nothing in common.
    """
    greedy = sampling.temperature == 0
    accepted = response.accepted[method]
    parted = divergence(verifier, answer.prompt_ids, answer.ids, decoded.ids)
    near_tie = greedy and parted is not None and parted.margin < NEAR_TIE[dtype]
    rounds_equal = None if parted else tuple(decoded.accepted) == accepted
    if parted:
        where = (
            f"prompt {response.id}: live decoding ({method}) left the stored response at token {parted.at} of "
            f"{len(answer.ids)}, where the verifier's logits are {parted.margin:.2g} apart"
        )
        if greedy and dtype == "float32" and not near_tie:
            raise AssertionError(  # ours, and the same each time: not worth a retry
                f"{where}, which is no near-tie ({NEAR_TIE[dtype]:g}); this is a bug in live decoding or in how the "
                "response was made"
            )
        log.warning("%s%s", where, ", a near-tie" if near_tie else "")
    elif not rounds_equal:
        log.warning(
            "prompt %s, %s: %d rounds accepting %d live, %d accepting %d in replay",
            response.id,
            method,
            len(decoded.accepted),
            sum(decoded.accepted),
            len(accepted),
            sum(accepted),
        )
    return {
        "id": response.id,
        "category": response.category,
        "method": method,
        "tokens": len(decoded.ids),
        "rounds": len(decoded.accepted),
        "accepted": sum(decoded.accepted),
        "text_equal": parted is None,
        "near_tie": near_tie,
        "rounds_equal": rounds_equal,
    }


def _costs(config: EvaluationConfig, measured: Sequence[Measured], *, num_slots: int) -> Costs | None:
    """As given, else as timed live; None where neither is there."""
    if config.verify_ms:
        given = tuple((nodes, ms / 1000) for nodes, ms in sorted(config.verify_ms.items()))
        return Costs(config.draft_ms / 1000, given, "given")
    timed = [one for one in measured if one.rounds]
    drafting = [one for one in timed if one.method != PLAIN]
    if len(drafting) in (0, len(timed)):
        return None
    verify = {}
    for one in timed:
        nodes = one.method if isinstance(one.method, int) else 0 if one.method == PLAIN else num_slots
        # trees cost the more the larger they are, as their verification does; a draft costs the same for all
        verify[nodes] = sum(one.seconds[step] for step in ("tree", "verify", "commit")) / one.rounds
    draft_seconds = sum(one.seconds["draft"] for one in drafting) / sum(one.rounds for one in drafting)
    return Costs(draft_seconds, tuple(sorted(verify.items())), "measured")
