"""Parity gate: does an exported drafter, loaded by another process, draft what it drafted while it was trained?

    python -m dflash.decoding.parity request.json

The training process writes what its own code path drafts after some anchors (`remember`), the one that asks names the
exported folder (`ask`), and a third loads that folder and the verifier, and nothing else: taps, mask token and RoPE as
config.json says, embedding and head as the verifier has them. It compares, decodes the prompts live, and compares the
rounds with replay. Where drafts differ it changes one thing at a time until they do not, which names the defect. Knows
no artifact and no store.

A anchors, S slots, T tokens, F features, H hidden
"""

import json
import math
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dflash.decoding.acceptance import CHAIN, cut, method_name
from dflash.decoding.ddtree import best_first, top_tokens
from dflash.decoding.live import Decoded, Method, decode
from dflash.decoding.near_ties import NEAR_TIE, coarser, divergence
from dflash.decoding.replay import replay_responses, response_span
from dflash.devices import resolve_device
from dflash.drafter.blocks import Documents
from dflash.drafter.export import load_drafter
from dflash.drafter.model import Drafter, Ends
from dflash.drafter.shape import DrafterConfig
from dflash.hidden.encoding import as_stored
from dflash.hidden.store import RowStates
from dflash.pinning import PinnedVerifier, num_tokens
from dflash.verifier import Verifier, load_verifier

REFERENCE = "parity.safetensors"  # beside a drafter that was trained here
MOST_ANCHORS = 32  # of a response: 15 slots of 32 anchors are 290 MB of logits where the vocabulary is large
MOST_TOKENS = 33  # of an answer that is decoded live
MUST_AGREE = {"float32": 1.0, "float16": 0.99, "bfloat16": 0.99, "fp8": 0.99}
"""Share of the drafts that are no near-ties, and of the rounds, that must be the same. Where it is not all, rounding is
worth a few logits now and then, so one round may always differ."""
UNCHECKED = "It was not checked that another process drafts with this drafter as in training."
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)
SECONDS = 1800.0


class Parity(NamedTuple):
    """What the other process found. `agreement` is the share of compared slots that are drafted alike, 1 where no slot
    was sure enough to be compared; of the live `rounds`, `near_ties` went otherwise than in replay because of a
    near-tie. `defect` is empty where all is well, else one of taps, norm, RoPE, mask, positions, head, mask token, live
    decoding, unknown.
    """

    agreement: float
    compared: int
    rounds: int
    near_ties: int = 0
    defect: str = ""
    explanation: str = ""


@torch.no_grad()
def remember(path: Path, *, drafter: Drafter, ends: Ends, rows: Sequence[RowStates], storage_dtype: str) -> None:
    """Write what `drafter`, as it was trained, drafts after some anchors of the responses of `rows`, by the same packed
    pass as in training. The first and the last anchor are among them, the others in between are as far from each other
    as MOST_ANCHORS allows. Both models are in the verifier's dtype; the rows' states were stored as `storage_dtype`.
    Nothing is written where no response has an anchor, that is two tokens.
    """
    device = drafter.fc.weight.device
    spans = [(row, *response_span(row.loss_mask_T)) for row in rows]
    responses = [(row, first, end) for row, first, end in spans if end - first > 1]
    if not responses:
        return
    documents = Documents(tuple(end - 1 for _, _, end in responses))
    features_PF = torch.cat([row.features_TF[: end - 1].to(device) for row, _, end in responses])
    context = drafter.context(features_PF, documents)
    reference = {}
    for number, (row, first, end) in enumerate(responses):
        ids_T = row.input_ids_T[:end].long()
        reference[f"ids.{number}"], reference[f"first.{number}"] = ids_T, torch.tensor(first)
        anchors_A = torch.linspace(first, end - 2, min(end - 1 - first, MOST_ANCHORS), dtype=torch.float64)
        anchors_A = anchors_A.round().long().to(device)
        reference[f"anchors.{number}"] = anchors_A.cpu()
        hidden_ASH = drafter.draft(
            ends, ids_T.to(device)[anchors_A], anchors_A=documents.offsets[number] + anchors_A, context=context
        )
        best_AS2 = ends.draft_logits(hidden_ASH).float().log_softmax(-1).topk(2)
        reference[f"drafts.{number}"] = ends.ids(best_AS2.indices[..., 0]).cpu()
        reference[f"margins.{number}"] = (best_AS2.values[..., 0] - best_AS2.values[..., 1]).cpu()
    dtype = str(drafter.fc.weight.dtype).removeprefix("torch.")
    metadata = {"storage_dtype": storage_dtype, "trained": json.dumps(drafter.config.to_json(dtype=dtype))}
    save_file({name: part.contiguous() for name, part in reference.items()}, path, metadata=metadata)


def ask(request: Path, exported: Path, *, reference: Path, verifier: PinnedVerifier, budget: int) -> None:
    """Write a request: whether the drafter in a folder drafts what `remember` has written."""
    asked = {
        "exported": str(exported.absolute()),
        "reference": str(reference.absolute()),
        "verifier": verifier.model_dump(mode="json"),
        "budget": budget,
    }
    request.write_text(json.dumps(asked) + "\n")


def check(request: Path) -> Parity:
    """Have a fresh process answer a request. Raises ValueError naming the defect where the drafter is not the same."""
    command = [sys.executable, "-m", "dflash.decoding.parity", str(request)]
    exported = json.loads(request.read_text())["exported"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"parity: another process took more than {SECONDS:g} s to load {exported} and decode with it; look at what "
            "else runs here, or set evaluation.parity to off"
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"parity: {exported} cannot be loaded and decoded with by another process: {last}")
    parity = Parity(**json.loads(done.stdout.splitlines()[-1]))
    if parity.defect:
        raise ValueError(
            f"parity: {exported} drafts {parity.agreement:.1%} of {parity.compared:,} tokens as in training; "
            f"{parity.defect}: {parity.explanation}"
        )
    return parity


@dataclass(frozen=True)
class Served:
    """A drafter as an engine would run it, with what may be wrong about it."""

    drafter: Drafter
    ends: Ends
    layers: tuple[int, ...]
    normed: bool = False  # the verifier's final norm is applied to the taps
    ahead: int = 0  # by which a block's positions are larger than they should be
    beyond: int = 0  # how many tokens from the anchor on a block sees the features of

    def changed(self, *, weights: dict[str, Tensor] | None = None, **config: Any) -> "Served":
        """With another config or other weights."""
        with torch.device("meta"):
            drafter = Drafter(replace(self.drafter.config, **config))
        drafter.load_state_dict(weights or self.drafter.state_dict(), assign=True)
        return replace(self, drafter=drafter.eval().requires_grad_(False))


class Reference(NamedTuple):
    """One response as the training process saw it."""

    ids_T: Tensor  # noqa: N815
    first: int
    anchors_A: Tensor  # noqa: N815
    drafts_AS: Tensor  # noqa: N815
    sure_AS: Tensor  # noqa: N815


def features(verifier: Verifier, served: Served, ids_T: Tensor, *, storage_dtype: str) -> Tensor:
    features_TF = verifier.forward(ids_T[None], layers=served.layers, greedy=False).features_BTF[0]
    if served.normed:
        features_TF = verifier.final_norm(features_TF.unflatten(-1, (len(served.layers), -1))).flatten(-2)
    return as_stored(features_TF, storage_dtype)


@torch.inference_mode()
def agreement(
    verifier: Verifier, served: Served, references: Sequence[Reference], *, storage_dtype: str
) -> tuple[float, int]:
    """The share of sure slots that are drafted as the reference says, and how many there are."""
    same = compared = 0
    for reference in references:
        ids_T = reference.ids_T.to(verifier.device)
        context = served.drafter.context(features(verifier, served, ids_T[:-1], storage_dtype=storage_dtype))
        anchors_A = reference.anchors_A.to(ids_T.device)
        # blocks are numbered from the context's start: another start moves their positions, or what they see
        context.start = served.ahead - served.beyond
        hidden_ASH = served.drafter.draft(
            served.ends, ids_T[anchors_A], anchors_A=anchors_A + served.ahead, context=context
        )
        drafts_AS = served.ends.ids(served.ends.draft_logits(hidden_ASH).argmax(-1)).cpu()
        same += int((drafts_AS == reference.drafts_AS)[reference.sure_AS].sum())
        compared += int(reference.sure_AS.sum())
    return same / compared if compared else 1.0, compared


def hypotheses(
    served: Served, trained: DrafterConfig, *, special_ids: Sequence[int]
) -> Iterator[tuple[str, str, Served]]:
    """Defect, explanation, and the drafter without it. What the training process used comes first."""
    config, ends = served.drafter.config, served.ends
    for layers in (trained.target_layer_ids, *(tuple(layer + by for layer in served.layers) for by in (-1, 1))):
        if len(layers) == len(served.layers) and all(0 <= layer < config.num_target_layers for layer in layers):
            yield (
                "taps",
                f"target_layer_ids must be {list(layers)}, not {list(served.layers)}",
                replace(served, layers=layers),
            )
    yield "taps", "the taps are in reverse order", replace(served, layers=served.layers[::-1])
    for token in dict.fromkeys([trained.mask_token_id, *special_ids]):
        changed = served.changed(mask_token_id=token)
        yield "mask token", f"mask_token_id must be {token}, not {config.mask_token_id}", changed
    for rope in (trained.rope, *(config.rope | {"rope_theta": theta} for theta in THETAS)):
        yield "RoPE", f"the parameters must be {rope}, not {config.rope}", served.changed(rope=rope)
    if len(trained.layer_types) == len(config.layer_types):
        changed = served.changed(layer_types=trained.layer_types, sliding_window=trained.sliding_window)
        kinds = f"{list(trained.layer_types)} with a window of {trained.sliding_window}"
        yield "mask", f"layer_types must be {kinds}", changed
    yield "mask", "blocks were trained to see the anchor's own features", replace(served, beyond=1)
    yield "mask", "blocks were trained to see one token less before the anchor", replace(served, beyond=-1)
    for by in (-1, 1):
        yield "positions", f"blocks were trained {by:+} token from where they are put", replace(served, ahead=by)
    eps = trained.rms_norm_eps
    yield "norm", f"rms_norm_eps must be {eps}, not {config.rms_norm_eps}", served.changed(rms_norm_eps=eps)
    weights = served.drafter.state_dict()
    for by in (1, -1):
        moved = {name: weight + by if weight.ndim == 1 else weight for name, weight in weights.items()}
        yield "norm", f"the weights of norms are {by:+} from those in the folder", served.changed(weights=moved)
    yield "norm", "the taps went through the verifier's final norm in training", replace(served, normed=True)
    if ends.head_VH is not ends.embedding_VH:
        tied = Ends(
            {"embed_tokens.weight": ends.embedding_VH}, dtype=ends.embedding_VH.dtype, device=ends.embedding_VH.device
        )
        yield (
            "head",
            "the embedding was the head in training, but the verifier has one of its own",
            replace(served, ends=tied.for_drafter(served.drafter, num_tokens=ends.draft_vocab_size)),
        )


def diagnose(
    verifier: Verifier,
    served: Served,
    references: Sequence[Reference],
    *,
    trained: DrafterConfig,
    storage_dtype: str,
    special_ids: Sequence[int],
    share: float,
    enough: float,
) -> tuple[str, str]:
    """Which one change makes the drafts those of the training process, `share` of which are as they are now: its name
    and an explanation.
    """
    best = ("unknown", "no single change of taps, norm, RoPE, mask, positions, head or mask token explains it", share)
    for defect, explanation, changed in hypotheses(served, trained, special_ids=special_ids):
        then, _ = agreement(verifier, changed, references, storage_dtype=storage_dtype)
        if then >= enough:
            return defect, explanation
        if then > best[2]:
            best = ("unknown", f"closest, with {then:.1%}, is {defect}: {explanation}", then)
    return best[:2]


@dataclass
class Rounds:
    """Live rounds that were compared with replay; the others, of which it is said where the first one was."""

    compared: int = 0
    near_ties: int = 0
    other: int = 0
    explanation: str = ""

    def add(self, *, equal: bool, near_tie: bool, where: str) -> None:
        self.compared += 1
        self.near_ties += not equal and near_tie
        if not (equal or near_tie):
            self.other += 1
            self.explanation = self.explanation or f"{where} than in replay, though all drafts are as in training"


@torch.inference_mode()
def live_rounds(
    verifier: Verifier,
    served: Served,
    references: Sequence[Reference],
    *,
    storage_dtype: str,
    budget: int,
    dtype: str,
    precision: str,
) -> Rounds:
    """Decode after each reference's prompt, and of every second one after most of its response as well, where contexts
    are long; compare text and rounds with those of plain decoding and its replay, up to where a text leaves it. What
    is a near-tie is for the verifier a matter of its `dtype`, for the drafter of the states' as well (`precision`).
    """
    rounds = Rounds()
    methods: dict[str, Method] = {CHAIN: "chain"}
    if not verifier.has_running_state:
        methods[method_name(budget)] = budget
    for number, reference in enumerate(references):
        first, end = reference.first, len(reference.ids_T)
        start = first if number % 2 == 0 else max(first, end - MOST_TOKENS)
        longest = min(end - first, MOST_TOKENS)
        prompt = reference.ids_T[:start].tolist()

        def live(method: Method, prompt: list[int] = prompt, longest: int = longest) -> Decoded:
            return decode(
                verifier,
                served.drafter,
                served.ends,
                prompt,
                layers=served.layers,
                max_new_tokens=longest,
                method=method,
                storage_dtype=storage_dtype,
            )

        response = live("plain").ids  # what the drafter was trained on may have been sampled, or be someone else's
        ids_T = torch.tensor(prompt + response)
        mask_T = torch.arange(len(ids_T)) >= start
        features_TF = features(verifier, served, ids_T.to(verifier.device), storage_dtype=storage_dtype)
        row = RowStates(features_TF, ids_T, mask_T, mask_T)
        [replayed] = replay_responses(served.drafter, served.ends, [row], budgets=[budget])
        for name, method in methods.items():
            found = live(method)
            parted = divergence(verifier, prompt, response, found.ids)
            same = parted.at if parted else len(response)  # tokens that are equal
            at = 0  # the anchor, counted from the response's first token
            for count in found.accepted:
                # a round goes up to its bonus token or the end of the text
                if at + 1 + count > same - bool(parted) or at + 1 >= same:
                    break
                replay_count, _ = cut(replayed.accepted_at[name][at], remaining=len(response) - 1 - at)
                near_tie = count != replay_count and is_near_tie(
                    served,
                    features_TF,
                    ids_T,
                    anchor=start + at,
                    slot=min(count, replay_count),
                    budget=method if isinstance(method, int) else None,
                    tolerance=NEAR_TIE[precision],
                )
                where = (
                    f"prompt {number}, {name}: the round from token {at} accepts {count} and not {replay_count}, other"
                )
                rounds.add(equal=count == replay_count, near_tie=near_tie, where=where)
                at += count + 1
            if parted:
                where = f"prompt {number}, {name}: the text from token {same} on is other"
                rounds.add(equal=False, near_tie=parted.margin < NEAR_TIE[dtype], where=where)
    return rounds


def is_near_tie(
    served: Served,
    features_TF: Tensor,
    ids_T: Tensor,
    *,
    anchor: int,
    slot: int,
    budget: int | None,
    tolerance: float,
) -> bool:
    """Whether it is a matter of rounding that the token of that slot (from 0) is drafted after the anchor, or is not:
    as the drafter's best one (no budget), or because its prefix is among the most probable.
    """
    device = served.ends.embedding_VH.device
    ids_T = ids_T.to(device)
    hidden_1SH = served.drafter.draft(
        served.ends,
        ids_T[anchor : anchor + 1],
        anchors_A=torch.tensor([anchor], device=device),
        context=served.drafter.context(features_TF[:anchor].to(device)),
    )
    logprobs_SV = served.ends.draft_logits(hidden_1SH[0]).float().log_softmax(-1)
    labels_S = served.ends.places(ids_T[anchor + 1 : anchor + slot + 2])
    if (labels_S < 0).any():  # what the drafter cannot propose is never nearly drafted
        return False
    scores_S = logprobs_SV[torch.arange(len(labels_S), device=device), labels_S]
    if budget is None:
        best_2 = logprobs_SV[slot].topk(2).values
        return bool((best_2 - scores_S[-1]).abs().max() < tolerance)
    size = budget + 1  # the last one within, and the first one without
    trees = best_first(*top_tokens(logprobs_SV[None], min(size, logprobs_SV.shape[-1])), budget=size)
    # each slot of the prefix has a rounding error of its own
    return bool((trees.scores_BN[0, budget - 1 :] - scores_S.sum()).abs().min() < tolerance * (slot + 1))


def answer(request: Path) -> Parity:
    """Load what the request names, compare, and diagnose."""
    asked = json.loads(request.read_text())
    pinned = PinnedVerifier(**asked["verifier"])
    verifier = load_verifier(pinned)
    dtype, device = getattr(torch, pinned.dtype), resolve_device(pinned.device)
    drafter = load_drafter(Path(asked["exported"]), dtype=dtype, device=device)
    ends = Ends(verifier.frozen_weights(), dtype=dtype, device=device, **verifier.logit_rule._asdict())
    ends = ends.for_drafter(drafter, num_tokens=num_tokens(pinned))
    with safe_open(asked["reference"], "pt") as file:
        storage_dtype, trained = file.metadata()["storage_dtype"], json.loads(file.metadata()["trained"])
        precision = coarser(pinned.dtype, storage_dtype)
        drafted_in = coarser(precision, trained["dtype"])
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name in file.keys():  # noqa: SIM118, a file of tensors is no mapping
            what, _, number = name.partition(".")
            parts[number][what] = file.get_tensor(name)
    references = [
        Reference(
            part["ids"],
            int(part["first"]),
            # drafters that remember no anchors remember the first ones
            part.get("anchors", int(part["first"]) + torch.arange(len(part["drafts"]))),
            part["drafts"],
            part["margins"] > NEAR_TIE[drafted_in],
        )
        for _, part in sorted(parts.items(), key=lambda item: int(item[0]))
    ]
    served = Served(drafter, ends, drafter.config.target_layer_ids)
    share, compared = agreement(verifier, served, references, storage_dtype=storage_dtype)
    if share < MUST_AGREE[drafted_in]:
        defect, explanation = diagnose(
            verifier,
            served,
            references,
            trained=DrafterConfig.from_json(trained),
            storage_dtype=storage_dtype,
            special_ids=sorted({token for ids in pinned.special_ids.values() for token in ids}),
            share=share,
            enough=MUST_AGREE[drafted_in],
        )
        return Parity(share, compared, 0, defect=defect, explanation=explanation)
    rounds = live_rounds(
        verifier,
        served,
        references,
        storage_dtype=storage_dtype,
        budget=asked["budget"],
        dtype=pinned.dtype,
        precision=precision,
    )
    most = math.ceil((1 - MUST_AGREE[precision]) * rounds.compared)
    failed = rounds.other > most
    return Parity(
        share,
        compared,
        rounds.compared,
        rounds.near_ties,
        "live decoding" if failed else "",
        rounds.explanation if failed else "",
    )


if __name__ == "__main__":
    print(json.dumps(answer(Path(sys.argv[1]))._asdict()))
