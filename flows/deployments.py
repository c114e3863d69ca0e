"""Register every deployment of prefect.yaml in one session: what `prefect deploy --all` does, in a third of its time.

    python -m flows.deployments

Run again, it brings what is registered up to date. What a person has set in the UI stays: schedules added there, and
whether a schedule is active; and deployments that were moved from the pool of this machine to another one (`prefect
deploy --name NAME --pool OTHER`) stay there, with what they need there.
"""

import os
import sys
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import ConcurrencyOptions, DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.exceptions import ObjectNotFound
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values

from flows import recipes
from flows.server import POOL


def register(client: SyncPrefectClient, path: Path) -> list[str]:
    """Register the deployments of the file; returns their names, FLOW/NAME. The work pool has to be there."""
    os.environ["PWD"] = str(path.parent)  # which the steps before a run name
    pull_steps: Any = apply_values(yaml.safe_load(path.read_text())["pull"], {}, remove_notset=False)
    flow_ids: dict[str, Any] = {}
    known = recipes.registered(path)
    for name, deployment in known.items():
        flow = recipes.load_flow(deployment["entrypoint"])
        if flow.name not in flow_ids:
            flow_ids[flow.name] = client.create_flow_from_name(flow.name)
        work_pool = deployment["work_pool"]
        pool, steps, variables = work_pool["name"], pull_steps, work_pool.get("job_variables")
        schedules: list[DeploymentSchedule] = []
        try:
            there = client.read_deployment_by_name(name)
            schedules = there.schedules
            if pool == POOL and there.work_pool_name not in (None, POOL):
                pool, steps, variables = there.work_pool_name, there.pull_steps, there.job_variables
        except ObjectNotFound:
            pass
        limit = deployment["concurrency_limit"]
        client.create_deployment(
            flow_ids[flow.name],
            deployment["name"],
            version=flow.version,
            description=deployment["description"],
            tags=deployment["tags"],
            parameters=deployment["parameters"],
            parameter_openapi_schema=parameter_schema(flow).model_dump(exclude_unset=True),
            enforce_parameter_schema=True,
            entrypoint=deployment["entrypoint"],
            pull_steps=steps,
            work_pool_name=pool,
            job_variables=variables,
            concurrency_limit=limit["limit"],
            concurrency_options=ConcurrencyOptions(collision_strategy=limit["collision_strategy"]),
            schedules=_schedules(deployment.get("schedules", []), schedules),
        )
    return list(known)


def _schedules(wanted: list[dict[str, Any]], there: list[DeploymentSchedule]) -> list[DeploymentScheduleCreate]:
    """Those of the file, by their slug, active as they are now; and those without slug, which are a person's."""
    active = {schedule.slug: schedule.active for schedule in there}
    ours = [
        DeploymentScheduleCreate(
            schedule=CronSchedule(cron=one["cron"], timezone=one["timezone"]),
            active=active.get(one["slug"], one.get("active", True)),
            parameters=one.get("parameters", {}),
            slug=one["slug"],
        )
        for one in wanted
    ]
    others = [
        DeploymentScheduleCreate(schedule=one.schedule, active=one.active, parameters=one.parameters)
        for one in there
        if one.slug is None
    ]
    return ours + others


def main() -> int:
    with get_client(sync_client=True) as client:
        register(client, recipes.prefect_yaml())
    return 0


if __name__ == "__main__":
    sys.exit(main())
