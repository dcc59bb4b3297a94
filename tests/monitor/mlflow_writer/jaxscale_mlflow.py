"""An MLflow writer for jaxscale, as an example of the entry point group jaxscale.writers (docs/watch.md).

MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME have their usual effect. jaxscale calls everything in one thread, and
reports what is raised here once, so that this code needs no threads and handles no errors.
"""

import os
import time

import mlflow
from mlflow.entities import Metric

MAX_METRICS = 1000  # of one request: https://mlflow.org/docs/latest/api_reference/rest-api.html#request-limits


class Run:
    """The MLflow run of a work folder. MLflow chooses run ids, so a later attempt finds the run by a tag."""

    def __init__(self, service_run):
        self.client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "jaxscale"
        experiment = self.client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self.client.create_experiment(name)
        tags = {"jaxscale.id": service_run.id}
        found = self.client.search_runs([experiment_id], f"tags.`jaxscale.id` = '{service_run.id}'", max_results=1)
        run = found[0] if found else self.client.create_run(experiment_id, tags=tags, run_name=service_run.run_name)
        self.run_id = run.info.run_id
        self.client.update_run(self.run_id, status="RUNNING")
        self.client.log_dict(self.run_id, service_run.settings, "config.json")  # MLflow's parameters cannot change
        self.address = f"run {self.run_id} in {mlflow.get_tracking_uri()}"

    def write(self, step, metrics):
        now = int(1000 * time.time())
        numbers = [Metric(name, value, now, step) for name, value in metrics.items() if isinstance(value, int | float)]
        for first in range(0, len(numbers), MAX_METRICS):
            self.client.log_batch(self.run_id, metrics=numbers[first : first + MAX_METRICS])

    def write_text(self, step, name, text):
        self.client.log_text(self.run_id, text, f"{name}/{step}.txt")

    def close(self):
        self.client.set_terminated(self.run_id)
