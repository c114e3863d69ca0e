"""Alerts on a real server, sent to a real receiver."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from queue import Empty, Queue
from typing import Any

import pytest
from prefect import flow
from prefect.blocks.notifications import SendgridEmail
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.events.worker import EventsWorker
from prefect.states import Crashed, Failed, State

from flows import automations
from flows.automations import ALERTS, BLOCK, apply

pytestmark = [
    pytest.mark.usefixtures("prefect_server"),
    pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning"),  # of what sends to Slack
]


class Receiver:
    """A webhook on this machine, which keeps what it is sent."""

    def __init__(self) -> None:
        received: Queue[tuple[str, dict[str, str]]] = Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.put((self.path, json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.received = received
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook/planted-5f1d"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.server.shutdown()
    receiver.server.server_close()


@pytest.fixture
def client(prefect_server: str) -> Iterator[SyncPrefectClient]:
    """Of a server without alerts, before and after."""

    def clear() -> None:
        for alert in ALERTS:
            for found in client.read_automations_by_name(alert.name):
                client.delete_automation(found.id)
        for block in client.read_block_documents():
            if block.name == BLOCK:
                client.delete_block_document(block.id)

    with get_client(sync_client=True) as client:
        clear()
        yield client
        clear()


def emit(event: str, *, of: str = "training-0123", **payload: Any) -> None:
    emit_event(
        event,
        resource={"prefect.resource.id": f"dflash.{of}", "prefect.resource.name": of},
        payload=payload,
    )
    EventsWorker.drain_all()


@flow(name="alerted")
def alerted() -> None:
    pass


def fail(client: SyncPrefectClient, state: State) -> None:
    """A run of a deployment, and one of no deployment, of which nobody is told."""
    deployment = client.create_deployment(client.create_flow(alerted), "nightly")
    for run in (client.create_flow_run(alerted, name="alone"), client.create_flow_run_from_deployment(deployment)):
        client.set_flow_run_state(run.id, state, force=True)


FACTS = {"recipe": "demo", "drafter": "training-0123", "champion": "training-4567", "reason": "2.1 against 2.9"}
TOLD: dict[str, tuple[Callable[[SyncPrefectClient], None], str, str]] = {
    "worse": (
        lambda _: emit("dflash.evaluation.worse", **FACTS),
        "demo: training-0123 is worse than the champion",
        r"2\.1 against 2\.9\. Champion: training-4567\.",
    ),
    "retraining": (
        lambda _: emit("dflash.retraining.due", **FACTS),
        "demo: retraining is due",
        r"training-0123: 2\.1 against 2\.9\.",
    ),
    "failed": (
        lambda client: fail(client, Failed(message="no disk")),
        ".*-.*: Failed",
        "no disk http.*/runs/flow-run/",
    ),
    "crashed": (lambda client: fail(client, Crashed(message="power")), ".*-.*: Crashed", "power http.*/runs/flow-run/"),
    "quota": (
        lambda _: emit("dflash.quota.exceeded", of="/data", bytes=7, quota_bytes=5),
        "/data: more than the quota",
        "7 bytes, of 5; dflash gc",
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_whoever_listens_is_told(client: SyncPrefectClient, receiver: Receiver, what: str) -> None:
    happen, subject, body = TOLD[what]
    assert apply(client, address=receiver.url) == [alert.name for alert in ALERTS]
    deadline = 40
    while deadline:  # the server takes up new automations within seconds
        happen(client)
        try:
            path, said = receiver.received.get(timeout=2)
            break
        except Empty:
            deadline -= 1
    assert path == "/hook/planted-5f1d"
    assert re.fullmatch(subject, said["subject"])
    assert re.match(body, said["body"])


def test_applied_again_nothing_is_doubled_and_what_was_switched_off_stays_off(client: SyncPrefectClient) -> None:
    apply(client, address="https://example.org/hook")
    (first,) = client.read_automations_by_name(ALERTS[0].name)
    client.request("PATCH", "/automations/{id}", path_params={"id": first.id}, json={"enabled": False})
    apply(client, address="https://hooks.slack.com/services/planted-5f1d")  # another kind of block
    (again,) = client.read_automations_by_name(ALERTS[0].name)
    assert (again.id, again.enabled) == (first.id, False)
    for alert in ALERTS[1:]:
        (found,) = client.read_automations_by_name(alert.name)
        assert found.enabled


def test_the_address_is_kept_as_a_secret(client: SyncPrefectClient) -> None:
    for address in ("https://example.org/planted-5f1d", "https://hooks.slack.com/services/planted-5f1d"):
        apply(client, address=address)
        documents = client.request("POST", "/block_documents/filter", json={}).text
        assert BLOCK in documents
        assert "planted-5f1d" not in documents


def test_a_block_that_a_person_made_is_used(client: SyncPrefectClient) -> None:
    email = SendgridEmail(api_key="planted", sender_email="from@example.org", to_emails=["to@example.org"])
    block_id = email.save(BLOCK)
    apply(client, address=None)
    (found,) = client.read_automations_by_name(ALERTS[0].name)
    assert [action.block_document_id for action in found.actions] == [block_id]  # type: ignore[union-attr]


def test_without_a_block_it_says_what_to_do(client: SyncPrefectClient) -> None:
    with pytest.raises(ValueError, match="no notification block dflash-alerts; set DFLASH_ALERTS_URL"):
        apply(client, address=None)
    with pytest.raises(ValueError, match="DFLASH_ALERTS_URL is no address of a webhook") as error:
        apply(client, address="user:planted-5f1d")
    assert "planted" not in str(error.value)
    assert automations.ADDRESS == "DFLASH_ALERTS_URL"
