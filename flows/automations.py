"""Alerts: who is told when a drafter is worse, retraining is due, a run fails or the disk is full.

The automations are declared here and put on the server by `dflash alerts`; done again, they are brought up to date.
What they send with is a notification block, dflash-alerts: made from DFLASH_ALERTS_URL, or by a person in the UI, of
any kind that sends notifications. Its address is a secret, which the block keeps encrypted.
"""

from dataclasses import dataclass
from uuid import UUID

from prefect.blocks.core import Block
from prefect.blocks.notifications import CustomWebhookNotificationBlock, SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import BlockDocument
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.types import SecretDict
from pydantic import SecretStr

from flows.reaper import upsert

BLOCK = "dflash-alerts"
ADDRESS = "DFLASH_ALERTS_URL"
SLACK = "https://hooks.slack.com/"


@dataclass(frozen=True)
class Alert:
    """What is told on which events. `subject` and `body` are Jinja templates of the event and its run."""

    name: str
    events: frozenset[str]
    subject: str
    body: str
    of_deployments: bool = False  # not of flows within flows, which fail together with what called them


PAGE = "{{ flow_run|ui_url }}"
ALERTS = (
    Alert(
        "dflash: a drafter is worse",
        frozenset({"dflash.evaluation.worse"}),
        "{{ event.payload.recipe }}: {{ event.payload.drafter }} is worse than the champion",
        f"{{{{ event.payload.reason }}}}. Champion: {{{{ event.payload.champion }}}}. {PAGE}",
    ),
    Alert(
        "dflash: retraining is due",
        frozenset({"dflash.retraining.due"}),
        "{{ event.payload.recipe }}: retraining is due",
        f"{{{{ event.payload.drafter }}}}: {{{{ event.payload.reason }}}}. {PAGE}",
    ),
    Alert(
        "dflash: a run failed",
        frozenset({"prefect.flow-run.Failed", "prefect.flow-run.Crashed"}),
        "{{ flow_run.name }}: {{ flow_run.state.name }}",
        f"{{{{ flow_run.state.message }}}} {PAGE}",
        of_deployments=True,
    ),
    Alert(
        "dflash: more data than the quota",
        frozenset({"dflash.quota.exceeded"}),
        "{{ event.resource.name }}: more than the quota",
        "{{ event.payload.bytes }} bytes, of {{ event.payload.quota_bytes }}; dflash gc shows what may go.",
    ),
)


def apply(client: SyncPrefectClient, *, address: str | None) -> list[str]:
    """Put the alerts on the server; returns their names. A person's switching one off stays.

    `address`: of a webhook, Slack's or any other, for the block; without one it has to be there. Raises ValueError
    where it is not, several blocks are called so, or the address is none.
    """
    block = _save_block(address) if address else _block(client).id
    for alert in ALERTS:
        related = {"prefect.resource.role": "deployment", "prefect.resource.id": "prefect.deployment.*"}
        upsert(
            client,
            AutomationCore(
                name=alert.name,
                description="Sends a notification. Written by dflash alerts.",
                trigger=EventTrigger(
                    type="event",
                    posture=Posture.Reactive,
                    expect=set(alert.events),
                    match_related=related if alert.of_deployments else {},
                    threshold=1,
                    within=0,
                ),
                actions=[SendNotification(block_document_id=block, subject=alert.subject, body=alert.body)],
            ),
        )
    return [alert.name for alert in ALERTS]


def _save_block(address: str) -> UUID:
    if not address.startswith(("https://", "http://")):  # not repeated: it may hold a password
        raise ValueError(f"{ADDRESS} is no address of a webhook; write it as https://host/path")
    if address.startswith(SLACK):
        block: Block = SlackWebhook(url=SecretStr(address))
    else:
        block = CustomWebhookNotificationBlock(
            name=BLOCK,
            url="{{ address }}",
            secrets=SecretDict({"address": address}),
            json_data={"subject": "{{ subject }}", "body": "{{ body }}"},
        )
    saved = block.save(BLOCK, overwrite=True)
    assert isinstance(saved, UUID)  # not a coroutine: there is no event loop here
    return saved


def _block(client: SyncPrefectClient) -> BlockDocument:
    found = [one for one in client.read_block_documents(limit=200, include_secrets=False) if one.name == BLOCK]
    if not found:
        raise ValueError(
            f"there is no notification block {BLOCK}; set {ADDRESS}=https://…, or make one of that name in the UI, of "
            "any kind that sends notifications"
        )
    if len(found) > 1:
        kinds = ", ".join(one.block_type.name for one in found if one.block_type)
        raise ValueError(f"several blocks are called {BLOCK} ({kinds}); leave one of them")
    return found[0]
