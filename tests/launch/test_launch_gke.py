"""launch/gke with a stand-in for kubectl; the manifest against published schemas."""

from __future__ import annotations

import copy
import pathlib
import re
import shlex
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from clusters import (
    CONFIG,
    bare_path,
    make_project,
    play_path,
    read_calls,
    read_check,
    read_environment,
    read_starts,
    run,
)

KUBERNETES = "1.34"  # Whose schemas are used.


@pytest.fixture
def project(tmp_path: pathlib.Path) -> pathlib.Path:
    return make_project(tmp_path)


def gke(project: pathlib.Path, *flags: str, **values: str) -> list[str]:
    """The command with a file of values: those of launch/gke/values.env, and these instead."""
    text = (project / "launch" / "gke" / "values.env").read_text()
    action = [word for word in flags if word in ("status", "logs", "stop")]
    flags = tuple(word for word in flags if word not in action)
    for key, value in values.items():
        text, count = re.subn(rf"(?m)^{key}=.*$", f"{key}={value}", text)
        assert count == 1
    (project / "my values").write_text(text)
    script = [str(project / "launch" / "gke" / "run.sh"), *action]
    return ["bash", *script, "--name=agentr1", f"--values={project / 'my values'}", *flags]


def run_pod(project: pathlib.Path, container: Any, slice_: str, index: str) -> tuple[int, str]:
    """Runs a container's command as a pod would; the fields of the pod that its variables refer to are all `slice_`."""
    words = [word.replace("$$", "$") for word in container["command"] + container["args"]]
    variables = {entry["name"]: entry.get("value", slice_).replace("$$", "$") for entry in container["env"]}
    fields = [entry["valueFrom"]["fieldRef"]["fieldPath"] for entry in container["env"] if "valueFrom" in entry]
    assert set(fields) == {"metadata.annotations['jobset.sigs.k8s.io/job-index']"}
    variables |= {"VENV_PYTHON": sys.executable, "JOB_COMPLETION_INDEX": index}
    return run(project, "env", f"--chdir={project}", *words, **variables)


@pytest.fixture
def manifest(project: pathlib.Path) -> Any:
    status, output = run(project, *gke(project, *CONFIG, "--config.note=$(HOME)"))
    assert status == 0, output
    return yaml.safe_load(play_path(project, "manifest").read_text())


def test_gke_creates_what_its_dry_run_shows(project: pathlib.Path, manifest: Any) -> None:
    """The image's command, run as a pod would run it, starts one process with its index."""
    assert read_calls(project) == [["kubectl", "create", "--filename=-", "--namespace=default"]]
    status, output = run(project, *gke(project, "--dry_run", *CONFIG, "--config.note=$(HOME)"))
    assert status == 0 and len(read_calls(project)) == 1
    check, _, rest = output.partition("\n")
    shown, _, command = rest.rpartition("kubectl create")
    assert "--check=v5e:4x4" in check and yaml.safe_load(shown) == manifest
    assert ["kubectl create" + command.rstrip()] == [shlex.join(words) for words in read_calls(project)]

    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    status, _ = run_pod(project, container, slice_="0", index="3")
    assert status == 0
    assert read_starts(project) == [["agentr1-train-0-0.agentr1:8476", "4", "3", *CONFIG, "--config.note=$(HOME)"]]


def test_gke_job_is_valid_by_the_published_schemas(manifest: Any) -> None:
    """Kubernetes' own, of kubernetes-validate, with unknown fields refused."""
    (replicated,) = manifest["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | replicated["template"]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    for path, key, value in (("spec", "completions", "four"), ("spec.template.spec", "restartPolice", "Never")):
        wrong = copy.deepcopy(job)
        part = wrong
        for name in path.split("."):
            part = part[name]
        part[key] = value
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


# The part used of jobset.x-k8s.io/v1alpha2, from the CRD of kubernetes-sigs/jobset v0.12.0
# (config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml); `template` is the Job template checked above.
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {
        "name": str,
        "namespace": str,
        "labels": {"kueue.x-k8s.io/queue-name": str},
        "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": str},
    },
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int,
            "restartStrategy": ("Recreate", "BlockingRecreate", "InPlaceRestart"),
            "rules": [
                {
                    "name": str,
                    "action": (
                        *("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
                        *("RestartJob", "RestartJobAndIgnoreMaxRestarts"),
                    ),
                    "onJobFailureReasons": [
                        (
                            *("BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes"),
                            *("MaxFailedIndexesExceeded", "PodFailurePolicy"),
                        )
                    ],
                }
            ],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": object}],
    },
}


def misfits(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """Where a value has a field that the schema has not, or another type."""
    if isinstance(schema, dict):
        for key in value:
            yield from misfits(value[key], schema[key], f"{path}.{key}") if key in schema else [f"{path}.{key}"]
    elif isinstance(schema, list):
        for item in value if isinstance(value, list) else [None]:
            yield from misfits(item, schema[0], path + "[]")
    elif not (value in schema if isinstance(schema, tuple) else isinstance(value, schema)):
        yield path


def test_gke_jobset_has_the_fields_of_its_crd(manifest: Any) -> None:
    assert not list(misfits(manifest, JOBSET))
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name = manifest["spec"]["failurePolicy"]["rules"][0]["name"]
    assert re.fullmatch("[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", name)
    assert list(misfits({"spec": {"network": {"subdomain": 1, "dns": True}}}, JOBSET)) == [
        ".spec.network.subdomain",
        ".spec.network.dns",
    ]


def test_gke_fails_at_once_for_a_mistake_and_else_restarts(manifest: Any) -> None:
    spec = manifest["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    (container,) = job["template"]["spec"]["containers"]
    assert (rule["action"], rule["onExitCodes"]["operator"], rule["onExitCodes"]["values"]) == ("FailJob", "In", [2])
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert spec["failurePolicy"]["rules"][0]["action"] == "FailJobSet"
    assert spec["failurePolicy"]["maxRestarts"] == 3
    assert (job["backoffLimit"], job["completions"], job["parallelism"], job["completionMode"]) == (0, 4, 4, "Indexed")
    # Pod 0's name: JobSet, replicated job, index of the job, index of the pod; the service has the subdomain's name.
    (address,) = (entry["value"] for entry in container["env"] if entry["name"] == "AGENTR1_COORDINATOR")
    host, port = address.split(":")
    assert host == "agentr1-train-0-0." + spec["network"]["subdomain"]
    assert {"containerPort": int(port)} in container["ports"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4, "memory": "160Gi"}
    assert container["resources"]["requests"] == {"google.com/tpu": 4, "memory": "100Gi", "cpu": "64"}
    pod = job["template"]["spec"]
    (shm,) = (volume["emptyDir"] for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert not pod["tolerations"] and "cloud.google.com/gke-spot" not in pod["nodeSelector"]
    assert not manifest["metadata"]["labels"]


def test_gke_runs_on_spot_slices_that_wait_in_a_queue(project: pathlib.Path) -> None:
    """Two slices of four hosts each: processes are numbered slice by slice, and libtpu is told of the slices."""
    flags = ("--slices=2", "--spot", "--restarts=9", "--env=NOTE=it's $5", "--data=/shared/data", *CONFIG)
    status, output = run(project, *gke(project, *flags, queue="team"))
    assert status == 0, output
    manifest = yaml.safe_load(play_path(project, "manifest").read_text())
    assert not list(misfits(manifest, JOBSET))
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    (replicated,) = manifest["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 2 and manifest["spec"]["failurePolicy"]["maxRestarts"] == 9
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}} | replicated["template"]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert [taint["key"] for taint in pod["tolerations"]] == ["cloud.google.com/gke-spot"]
    assert read_check(project)[:2] == ["/shared/data", "--check=v5e:2*4x4"]
    status, output = run_pod(project, pod["containers"][0], slice_="1", index="2")
    assert status == 0, output
    assert read_starts(project) == [["agentr1-train-0-0.agentr1:8476", "8", "6", *CONFIG]]
    assert read_environment(project, 6) == {
        "AGENTR1_DATA": "/shared/data",
        "MEGASCALE_COORDINATOR_ADDRESS": "agentr1-train-0-0.agentr1:8081",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_PORT": "8081",
        "MEGASCALE_SLICE_ID": "1",
        "NOTE": "it's $5",
    }


def test_gke_keeps_secrets_out_of_commands_and_manifests(project: pathlib.Path) -> None:
    status, output = run(project, *gke(project, "--secret=WANDB_API_KEY", *CONFIG), WANDB_API_KEY="hush =1")
    assert status == 0 and "hush" not in output
    assert "hush" not in play_path(project, "record").read_text() + play_path(project, "manifest").read_text()
    stored = play_path(project, "secrets")
    assert stored.read_text() == "WANDB_API_KEY=hush =1\n" and stored.stat().st_mode & 0o777 == 0o600
    assert [words[1:4] for words in read_calls(project)][:2] == [
        ["delete", "secret", "agentr1-secrets"],
        ["create", "secret", "generic"],
    ]
    pod = yaml.safe_load(play_path(project, "manifest").read_text())["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pod["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "agentr1-secrets"}}]


def test_gke_creates_nothing_for_a_run_that_would_be_refused(project: pathlib.Path) -> None:
    play_path(project, "mistake").write_text("2")
    status, output = run(project, *gke(project, *CONFIG))
    assert status == 2 and "nothing was asked for" in output and not read_calls(project)
    assert run(project, *gke(project, "--no_check", *CONFIG))[0] == 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shm": "16 GB"}, "shm=16 GB must match"),
        ({"queue": "Team"}, "queue=Team must match"),
        ({"port": "8476\nname=mine"}, "name is no value of the cluster; give it as --name"),
        ({"hosts": "2"}, "topology=4x4 has 16 chips, but hosts=2 with chips_per_host=4 have 8"),
        ({"hosts": "0"}, "hosts=0 must be at least 1"),
        ({"image": 'x"'}, 'image=x" must match'),
        ({"port": "8476\nports=1"}, "has unknown ports"),
        ({"port": "8476\nport=1"}, "a second 'port'"),
        ({"port": "8476\nport"}, "'port' is not key=value"),
        ({"port": "8476\n# a comment"}, None),
    ],
)
def test_gke_names_bad_values(project: pathlib.Path, values: dict[str, str], message: str | None) -> None:
    status, output = run(project, *gke(project, "--dry_run", *CONFIG, **values))
    assert status == (2 if message else 0)
    if message:
        assert output.startswith("error: ") and message in output and output.count("\n") == 1


def test_gke_wants_every_value(project: pathlib.Path) -> None:
    command = gke(project, *CONFIG)
    path = project / "my values"
    path.write_text(path.read_text().replace("image=", "#image="))
    status, output = run(project, *command)
    assert (status, output) == (2, f"error: {path} misses image; launch/gke/values.env lists them all\n")
    path.unlink()
    status, output = run(project, *command)
    assert status == 2 and output.startswith("error: cannot read the values: ")
    assert not read_calls(project)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--values=", *CONFIG], "--values is missing"),
        (["--name=Mine", *CONFIG], "--name=Mine must match"),
        (["--restarts=often", *CONFIG], "--restarts is 'often'"),
        (["--slices=0", *CONFIG], "--slices is '0'"),
        (
            ["--config=x.py", "--config.run_dir=runs/mine"],
            "the disk of a pod is deleted with it: give --config.run_dir=/shared",
        ),
        ([], "--config=FILE is missing"),
        (["--delete", *CONFIG], "unknown flag '--delete'"),
    ],
)
def test_gke_names_bad_flags(project: pathlib.Path, flags: list[str], message: str) -> None:
    status, output = run(project, *gke(project, *flags))
    assert status == 2
    assert output.startswith(f"error: {message}") and output.count("\n") == 1


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        ('error: resource mapping not found: no matches for kind "JobSet"', "the cluster has no JobSet controller"),
        ("Error from server (AlreadyExists): jobsets agentr1 already exists", "there is a JobSet agentr1; end it with"),
        ('Error from server (Forbidden): jobsets is forbidden: User "me" cannot create', "no permission"),
    ],
)
def test_gke_names_refusals(project: pathlib.Path, refusal: str, message: str) -> None:
    play_path(project, "refuse").write_text(refusal + "\n")
    status, output = run(project, *gke(project, *CONFIG))
    assert status == 2
    assert output.startswith(f"{refusal}\nerror: {message}")


@pytest.mark.parametrize(
    ("action", "first"),
    [("stop", "delete jobset agentr1"), ("status", "get jobset agentr1"), ("logs", "logs --selector=jobset")],
)
def test_gke_looks_after_a_run(project: pathlib.Path, action: str, first: str) -> None:
    status, shown = run(project, *gke(project, action, "--context=lab", "--dry_run"))
    assert status == 0 and not read_calls(project)
    assert run(project, *gke(project, action, "--context=lab"))[0] == 0
    assert read_calls(project) == [shlex.split(line) for line in shown.splitlines()]
    assert " ".join(read_calls(project)[0]).startswith(f"kubectl {first}")


def test_a_kubectl_that_is_not_there_is_named(project: pathlib.Path) -> None:
    status, output = run(project, *gke(project, *CONFIG), **bare_path(project))
    assert status == 2 and output.startswith("error: kubectl is not on PATH; ")
    assert run(project, *gke(project, "--dry_run", *CONFIG), **bare_path(project))[0] == 0
