"""Where the calls of a step run: one after another in this process, or on the workers of a Ray or Dask cluster.

On a cluster the calls are tasks of a sub-flow. Workers answer with small records; the bytes stay on the disk that all
machines share. Ray and Dask are imported only where they are asked for.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.futures import PrefectFuture
from prefect.states import Crashed
from prefect.task_runners import TaskRunner
from prefect.tasks import Task

from dflash.config import ExtractionConfig, VerifierConfig
from dflash.manifests import home

Call = tuple[Task[..., Any], tuple[Any, ...]]
CallAll = Callable[..., list[State[Any]]]
"""(task, calls, first=…, **kwargs): the final state of each call, in order. `first`, a call, must succeed before."""

OBJECT_STORE_BYTES = 10**8  # of a local Ray cluster, which would take a third of the memory for what is small here


def one_after_another(
    task: Task[..., Any], calls: Sequence[tuple[Any, ...]], *, first: Call | None = None, **kwargs: Any
) -> list[State[Any]]:
    """The calls in this process: a CallAll."""
    if first:
        first[0](*first[1], **kwargs)
    return [task(*args, **kwargs, return_state=True) for args in calls]


def runner_of(extraction: ExtractionConfig, verifier: VerifierConfig) -> CallAll:
    """How the shards are to be made. Raises ValueError where that needs another device."""
    name = extraction.runner
    if name == "inline":
        return one_after_another
    if ":" in verifier.device:
        raise ValueError(
            f"verifier.device: {verifier.device} is one GPU, but workers get different ones; set it to auto or cuda"
        )

    def on_cluster(
        task: Task[..., Any], calls: Sequence[tuple[Any, ...]], *, first: Call | None = None, **kwargs: Any
    ) -> list[State[Any]]:
        work = Work(task, calls, first=first, arguments=kwargs)

        @flow(name=f"{task.name}s", task_runner=RUNNERS[name](extraction), persist_result=False)
        def together() -> list[State[Any]]:
            context = FlowRunContext.get()
            assert context  # inside a flow
            with REQUESTS[name](context.task_runner, verifier):
                return work.run()

        try:
            ended = together(return_state=True)
            if not work.states:
                ended.result()  # raises: what is wrong with the cluster, or with `first`
        except OSError as error:
            if work.begun:
                raise
            place = extraction.address or f"a local {name} cluster"
            raise ValueError(f"extraction.address: {place} does not answer ({error}); is it up?") from error
        return work.states

    return on_cluster


class Work:
    """The calls of a sub-flow, and what became of them."""

    def __init__(
        self,
        task: Task[..., Any] | None = None,
        calls: Sequence[tuple[Any, ...]] = (),
        *,
        first: Call | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.task = task
        self.calls = calls
        self.first = first
        self.arguments = arguments
        self.begun = False
        self.states: list[State[Any]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return (Work, ())  # Prefect sends the sub-flow along with each of its tasks; workers need no other's rows

    def run(self) -> list[State[Any]]:
        """Submit all and wait for all. Raises what `first` raises."""
        assert self.task
        self.begun = True
        if self.first:
            self.first[0].submit(*self.first[1], **self.arguments).result()
        futures = [self.task.submit(*call, **self.arguments) for call in self.calls]
        self.states = [_final_state(future) for future in futures]
        return self.states


def _final_state(future: PrefectFuture[Any]) -> State[Any]:
    try:
        future.result(raise_on_failure=False)
    except Exception as error:  # a worker that died, again and again
        return Crashed(message=f"{type(error).__name__}: {error}", data=error)
    return future.state


def _ray_runner(extraction: ExtractionConfig) -> TaskRunner[Any]:
    from prefect_ray import RayTaskRunner

    options: dict[str, Any] = {"runtime_env": {"env_vars": {"DFLASH_HOME": str(home())}}}
    if not extraction.address:
        options |= {"num_cpus": extraction.max_workers, "object_store_memory": OBJECT_STORE_BYTES}
        options |= {"include_dashboard": False}
    return RayTaskRunner(init_kwargs={"address": extraction.address or "local", **options})


def _ray_requests(runner: TaskRunner[Any], verifier: VerifierConfig) -> Any:
    """The resources of each worker; without `max_calls` Ray would load the verifier anew for each shard on a GPU."""
    del runner
    import ray
    from prefect_ray.context import remote_options

    most = max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    return remote_options(num_gpus=gpus_wanted(verifier, most), max_calls=0)


def gpus_wanted(verifier: VerifierConfig, most_of_a_node: int) -> int:
    """GPUs of a worker, in a cluster whose best machine has so many."""
    if verifier.device == "cpu":
        return 0
    if verifier.device == "cuda" and not most_of_a_node:
        raise ValueError("verifier.device: cuda asked for, but the cluster has no GPU; give auto or cpu")
    return most_of_a_node if verifier.device_map else min(1, most_of_a_node)


def _dask_runner(extraction: ExtractionConfig) -> TaskRunner[Any]:
    from prefect_dask import DaskTaskRunner

    if extraction.address:
        return DaskTaskRunner(address=extraction.address)
    cluster = {"n_workers": extraction.max_workers, "threads_per_worker": 1, "dashboard_address": ":0"}
    return DaskTaskRunner(cluster_kwargs=cluster)


def _dask_requests(runner: Any, verifier: VerifierConfig) -> Any:
    """Nothing to ask for: a worker has the GPUs it was started with. Raises ValueError for one of another data root."""
    del verifier
    for worker, folder in runner.client.run(_data_root).items():
        if folder != _data_root():
            raise ValueError(f"{worker}: its data is in {folder}; start it with DFLASH_HOME={_data_root()}")
    return nullcontext()


def _data_root() -> str:
    return os.fspath(home())


RUNNERS: dict[str, Callable[[ExtractionConfig], TaskRunner[Any]]] = {"ray": _ray_runner, "dask": _dask_runner}
REQUESTS: dict[str, Callable[[Any, VerifierConfig], Any]] = {"ray": _ray_requests, "dask": _dask_requests}
