"""The REST routes: their answers match the schema and what Python returns."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import pytest
from matrix import in_turn, of_today
from starlette.testclient import TestClient

from fsdp_advisor.diagnosis import diagnose_text, job_of
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.export import TARGETS
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.server import schema

LLAMA = "meta-llama/Llama-2-7b-hf"
JSON = {"Content-Type": "application/json"}
JOBS: list[dict[str, Any]] = [
    {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"},
    {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB", "strategy": "zero3", "reserved": True},
    {"model": LLAMA, "gpus": 16, "nnodes": 2, "gpu": "H100", "explain": True, "activation_checkpointing": "full"},
    {"model": "mistralai/Mixtral-8x7B-v0.1", "gpus": 8, "gpu": "H100", "precision": "bf16"},
    {"model": "mistralai/Mixtral-8x7B-v0.1", "gpus": 8, "gpu": "H100", "strategy": "ddp"},
    {"model": "7e9", "gpus": 4, "gpu": "24GiB", "precision": "fp32"},
    {"model": "openai-community/gpt2", "gpus": 2, "gpu": "24GiB", "offload": "parameters"},
]


def assert_described(answer: dict[str, Any], kind: type[schema.Estimate] = schema.Estimate) -> None:
    kind.model_validate(answer)
    assert set(answer) == set(schema.Estimate.model_fields)
    described = set(schema.StrategyEstimate.model_fields)
    for row in answer["estimates"]:
        assert described - {"timeline"} <= set(row) <= described


@pytest.mark.parametrize("job", JOBS, ids=lambda job: "-".join(str(v) for v in job.values()))
def test_get_and_post_return_what_python_returns(client: TestClient, job: dict[str, Any]) -> None:
    asked = client.get("/api/v1/estimate", params=job)
    posted = client.post("/api/v1/estimate", json=job)
    assert asked.status_code == posted.status_code == 200
    assert asked.content == posted.content
    answer = asked.json()
    assert_described(answer)
    options = {k: v for k, v in job.items() if k != "explain"}
    model = resolve(job["model"], allow_recording=False)  # the server does not record models of the catalog
    expected = estimate_resolved(make_request(options), model, explain="explain" in job).as_dict(
        timeline="explain" in job
    )
    assert answer == json.loads(json.dumps(expected))


@pytest.mark.parametrize("find", of_today([None, "batch", "gpus"], days=3))
def test_recommend_returns_the_choice_and_its_path(client: TestClient, find: str | None) -> None:
    job = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"} | ({"find": find} if find else {})
    asked = client.get("/api/v1/recommend", params=job)
    assert asked.status_code == 200 and asked.content == client.post("/api/v1/recommend", json=job).content
    answer = asked.json()
    assert_described(answer, schema.Advice)
    chosen = answer["recommendation"]
    assert chosen["strategy"] in ("ddp", "zero1", "zero2", "zero3") and chosen["path"]
    assert all({"question", "answer", "because"} <= set(node) for node in chosen["path"])


def test_recommend_names_adapters_if_the_whole_model_cannot_be_trained(client: TestClient) -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpus": 1, "gpu": "24GiB", "strategy": "ddp", "offload": "none"}
    found = client.get("/api/v1/recommend", params=job).json()["recommendation"]["what_would_fit"]
    assert found[-1]["options"] == {"use_peft": True}


def test_every_key_of_a_check_is_described(client: TestClient) -> None:
    answer = client.get("/api/v1/check", params={"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"}).json()
    assert set(answer) == set(schema.Check.model_fields)


@in_turn(2, of=3)
def test_a_micro_batch_that_the_catalog_lacks_is_recorded(client: TestClient) -> None:
    job = {"model": "jhu-clsp/ettin-encoder-17m", "gpu": "L4", "strategy": "ddp", "micro_batch_size": 2}
    asked = client.get("/api/v1/estimate", params=job)
    assert asked.status_code == 200
    assert asked.json() == json.loads(json.dumps(estimate_resolved(make_request(job), resolve(job["model"])).as_dict()))


OUT_OF_MEMORY = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 1 has a total capacity of 39.39 GiB of which "
    "1.00 GiB is free. Of the allocated memory 34.00 GiB is allocated by PyTorch, and 3.00 GiB is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize("path", ["/api/v1/estimate", "/api/v1/export/trl", "/"])
def test_a_task_whose_framework_is_assumed_is_recorded(client: TestClient, path: str) -> None:
    """TRL's batch of pairs is not in the catalog."""
    job = {
        "model": "gpt2",
        "gpus": 2,
        "gpu": "A100",
        "task": "dpo",
        "strategy": "ddp",
        "seq_len": 64,
        "micro_batch_size": 1,
    }
    got = client.get(path, params=job)
    assert got.status_code == 200 and "not in the catalog" not in got.text
    if path == "/api/v1/estimate":
        assert got.json()["estimates"] == client.get(path, params={**job, "framework": "trl"}).json()["estimates"]


@pytest.mark.parametrize("job", [None, {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB", "strategy": "zero3"}])
def test_diagnose_returns_what_python_returns(client: TestClient, job: dict[str, Any] | None) -> None:
    answer = client.post("/api/v1/diagnose", json={"text": OUT_OF_MEMORY, "job": job}).json()
    schema.Diagnosis.model_validate(answer)
    assert set(answer) == set(schema.Diagnosis.model_fields)
    expected = diagnose_text(OUT_OF_MEMORY, None if job is None else job_of(make_request(job))).as_dict()
    assert answer == json.loads(json.dumps(expected))


def test_diagnose_refuses_text_without_an_error(client: TestClient) -> None:
    answer = client.post("/api/v1/diagnose", json={"text": "loss 2.3"})
    assert answer.status_code == 422 and "no out-of-memory error" in answer.json()["error"]


@pytest.mark.parametrize("target", TARGETS)
def test_every_export_can_be_downloaded(client: TestClient, target: str) -> None:
    backend = (
        "deepspeed" if "deepspeed" in target or target == "llamafactory" else "ddp" if target == "ddp" else "fsdp2"
    )
    job = {
        "model": LLAMA,
        "gpus": 4,
        "gpu": "H100",
        "strategy": "ddp" if backend == "ddp" else "zero3",
        "backend": backend,
    }
    got = client.get(f"/api/v1/export/{target}", params=job)
    assert got.status_code == 200, got.text
    assert got.headers["content-disposition"].startswith("attachment; filename=") and got.text
    assert client.post(f"/api/v1/export/{target}", json=job).text == got.text


def test_a_bundle_is_an_archive_of_every_file(client: TestClient) -> None:
    job = {"model": LLAMA, "gpus": 4, "gpu": "H100", "strategy": "zero3", "bundle": True}
    got = client.get("/api/v1/export/deepspeed", params=job)
    assert (got.status_code, got.headers["content-type"]) == (200, "application/zip")
    with zipfile.ZipFile(io.BytesIO(got.content)) as archive:
        assert sorted(archive.namelist()) == ["README.md", "deepspeed-launch.sh", "ds_config.json", "train.py"]
        assert archive.getinfo("deepspeed-launch.sh").external_attr >> 16 & 0o111
    assert client.post("/api/v1/export/deepspeed", json=job).content == got.content


def test_models_and_gpus_are_filtered_by_the_pattern(client: TestClient) -> None:
    models, gpus = client.get("/api/v1/models?pattern=llama-2").json(), client.get("/api/v1/gpus?pattern=h100").json()
    assert {m["id"] for m in models} >= {LLAMA} and all("llama-2" in m["id"].lower() for m in models)
    assert {g["name"] for g in gpus} >= {"H100-80GB"}


@in_turn(1, of=2)
def test_answers_are_compressed_and_revalidated_by_their_tag(client: TestClient) -> None:
    url = f"/api/v1/estimate?model={LLAMA}&gpus=4&gpu=H100"
    first = client.get(url)
    assert "max-age" in first.headers["cache-control"] and first.headers["content-encoding"] == "gzip"
    assert first.headers["vary"] == client.get("/").headers["vary"] == "Accept-Encoding"
    again = client.get(url, headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304 and not again.content
    plain = client.get(url, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.json() == first.json()


def test_a_missing_model_is_named_in_the_error(client: TestClient) -> None:
    refused = client.get("/api/v1/estimate")
    assert refused.status_code == 422
    assert refused.json()["error"] == "model is missing"
    for body, said in (({"gpus": 4}, "model is missing"), ({"model": "7B", "config": {}}, "model or config, not both")):
        posted = client.post("/api/v1/estimate", json=body)
        assert posted.status_code == 422 and said in posted.json()["error"]


@pytest.mark.parametrize("route", ["estimate", "recommend", "check", "export/fsdp2", "compare", "diagnose"])
def test_a_post_refuses_options_in_its_query_string(client: TestClient, route: str) -> None:
    posted = client.post(f"/api/v1/{route}?gpus=8&bogus=1", json={"model": "7B"})
    assert posted.status_code == 422
    assert "gpus, bogus" in posted.json()["error"] and "body" in posted.json()["hint"]


@pytest.mark.parametrize("path", ["/api/v1/models", "/api/v1/gpus"])
def test_a_parameter_that_a_list_does_not_have_is_refused(path: str, client: TestClient) -> None:
    refused = client.get(path, params={"patern": "h100"})
    assert (refused.status_code, refused.json()["error"]) == (422, "no such option: patern")
    assert refused.json()["hint"] == "did you mean pattern?"
    assert client.get(path, params={"pattern": "llama"}).status_code == 200


def test_an_option_without_its_underscores_is_recognized(client: TestClient) -> None:
    refused = client.get("/api/v1/estimate", params={"model": "gpt2", "batchsize": 4})
    assert (refused.status_code, refused.json()["hint"]) == (422, "did you mean micro_batch_size?")


def test_the_hint_for_an_unknown_model_mentions_no_path(client: TestClient) -> None:
    hint = client.get("/api/v1/estimate?model=nothing-like-it").json()["hint"]
    assert "paste" in hint and "/api/v1/models" in hint and "directory" not in hint


def test_operators_find_health_metrics_and_the_openapi_document(client: TestClient) -> None:
    assert client.get("/healthz").status_code == client.get("/readyz").status_code == 200
    client.get(f"/api/v1/estimate?model={LLAMA}")
    metrics = client.get("/metrics").text
    assert 'route="/api/v1/estimate"' in metrics
    described = client.get("/openapi.json").json()
    for path in ("estimate", "recommend", "export/{target}"):
        assert set(described["paths"][f"/api/v1/{path}"]) == {"get", "post"}
    assert client.get("/docs").status_code == 200


def test_a_pasted_config_is_recorded_and_answered(client: TestClient) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
    }
    body = {"config": config, "gpus": 2, "gpu": "24GiB", "strategy": "zero3"}
    first = client.post("/api/v1/estimate", json=body)
    assert first.status_code == 200, first.text
    assert first.json()["model"]["source"] == "config" and first.json()["estimates"][0]["peak_tensor_bytes"] > 0
    assert client.post("/api/v1/estimate", json=body).content == first.content


def test_infinity_in_a_pasted_config_gives_strict_json(client: TestClient) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 128,
        "time_step_limit": [0.0, float("inf")],
        "x": float("nan"),
    }
    job = {"gpus": 2, "gpu": "24GiB", "strategy": "zero3"}

    def strict(answer: Any) -> Any:
        return json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))

    for route in ("estimate", "check"):
        got = client.post(f"/api/v1/{route}", content=json.dumps({"config": config, **job}), headers=JSON)
        assert got.status_code == 200, got.text
        assert strict(got)
    body = json.dumps({"config": config | {"hidden_size": float("inf")}, **job})
    refused = client.post("/api/v1/estimate", content=body, headers=JSON)
    assert refused.status_code == 422 and "not Infinity" in str(strict(refused))


@pytest.mark.parametrize("path", ["/", "/.json"])
def test_page_reads_infinity_in_a_pasted_config(client: TestClient, path: str) -> None:
    config = '{"model_type": "no_such", "time_step_limit": [0.0, Infinity]}'
    got = client.get(path, params={"config": config, "gpus": 2, "gpu": "24GiB"})
    assert "no model of type" in got.text and "no_such" in got.text


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"gpus": None}, "gpus must be a whole number, not null"),
        ({"gpus": True}, "gpus must be a whole number, not true"),
        ({"strategy": ["ddp", False]}, 'not ["ddp", false]'),
        ({"freeze": [None]}, "freeze must be text, not null"),
        ({"explain": None}, "explain must be true or false, not null"),
        ({"config_file": "fsdp.yaml"}, "config_file must be a list, not fsdp.yaml"),
        ({"config_file": ["fsdp.yaml"]}, "config_file.0 must be a JSON object, not fsdp.yaml"),
        ({"config_file": [{"name": "fsdp.yaml"}]}, "config_file.0.text is missing"),
    ],
)
def test_errors_name_the_place_and_write_values_as_json_does(
    client: TestClient, body: dict[str, Any], message: str
) -> None:
    assert message in client.post("/api/v1/estimate", json={"model": "gpt2", **body}).json()["error"]


def test_infinity_in_a_query_is_refused_in_strict_json(client: TestClient) -> None:
    body = '{"model": "7B", "gpus": 2, "gpu": "24GiB", "seq_len": Infinity}'
    got = client.post("/api/v1/estimate", content=body, headers=JSON)
    assert got.status_code == 422
    assert json.loads(got.content, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_largest_possible_job_is_answered(client: TestClient) -> None:
    job = {
        "model": "meta-llama/Llama-3.1-405B",
        "gpus": 65536,
        "gpu": "H100",
        "strategy": "zero3",
        "reserved": True,
        "micro_batch_size": 1048576,
        "seq_len": 16777216,
    }
    got = client.get("/api/v1/estimate", params=job)
    assert got.status_code == 200 and got.json()["estimates"][0]["fits"] is False


def test_a_list_of_patterns_is_repeated_in_a_query(client: TestClient) -> None:
    query = [("model", LLAMA), ("freeze", "nowhere"), ("freeze", "visual")]
    asked = client.get("/api/v1/estimate", params=query)
    posted = client.post("/api/v1/estimate", json={"model": LLAMA, "freeze": ["nowhere", "visual"]})
    assert asked.json() == posted.json()
    assert asked.status_code == 422 and "has no parameter that matches 'nowhere'" in asked.json()["error"]


def test_an_adapter_config_is_posted_as_an_object_or_as_its_text(client: TestClient) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_dropout": 2}
    replies = [client.post("/api/v1/estimate", json={"model": LLAMA, "peft_config": c}) for c in (config, json.dumps(config))]  # fmt: skip
    assert [reply.json() for reply in replies] == [replies[0].json()] * 2
    refused = client.post("/api/v1/estimate", json={"model": LLAMA, "peft_config": "/etc/passwd"}).json()
    assert refused["error"] == "peft_config must be the text of an adapter_config.json, not /etc/passwd"
