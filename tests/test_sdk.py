"""The official SDK, sync and async, against the live service on a fake engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import fake_predict
from live import LiveService, serve

from intern_decision_serve.pins import DEFAULT_MODEL, FAMILY

sdk = pytest.importorskip("typesafe_sdk")
pytest.importorskip("backports.zstd")

SERVED_AS = FAMILY[DEFAULT_MODEL].served_as
STATE = "I was charged twice for my March invoice."
RAW_QUESTIONS: dict[str, Any] = {
    "refund": {"type": "noul", "instructions": "Is this about a refund?"},
    "team": {
        "type": "choice",
        "instructions": "Who takes it?",
        "criteria": {"billing": "invoices", "support": None},
    },
    "anger": {"type": "score", "instructions": "How angry?", "criteria": ["no", "yes"]},
}
TYPED_QUESTIONS = {
    "refund": sdk.Noul(instructions="Is this about a refund?"),
    "team": sdk.Choice(
        instructions="Who takes it?", criteria={"billing": "invoices", "support": None}
    ),
    "anger": sdk.Score(instructions="How angry?", criteria=["no", "yes"]),
}
NO_RETRY = sdk.RetryPolicy(max_retries=0)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveService]:
    with serve() as service:
        yield service


class Sync:
    """The synchronous client, one call a time."""

    def __init__(self, url: str, token: str, **options: Any) -> None:
        self._make = lambda: sdk.TypeSafeClient(
            base_url=url, api_key=token, timeout=30, **options
        )

    def system_one(self, *args: Any, **options: Any) -> Any:
        with self._make() as client:
            return client.system_one(*args, **options)

    def list_models(self) -> Any:
        with self._make() as client:
            return client.models.list()


class Async:
    """The asynchronous one, behind the same two methods."""

    def __init__(self, url: str, token: str, **options: Any) -> None:
        self._make = lambda: sdk.AsyncTypeSafeClient(
            base_url=url, api_key=token, timeout=30, **options
        )

    def system_one(self, *args: Any, **options: Any) -> Any:
        async def ask() -> Any:
            async with self._make() as client:
                return await client.system_one(*args, **options)

        return asyncio.run(ask())

    def list_models(self) -> Any:
        async def ask() -> Any:
            async with self._make() as client:
                return await client.models.list()

        return asyncio.run(ask())


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def make(request: pytest.FixtureRequest) -> Callable[..., Any]:
    client: Callable[..., Any] = request.param
    return client


class TestAnswers:
    @pytest.mark.parametrize("questions", [RAW_QUESTIONS, TYPED_QUESTIONS])
    def test_every_answer_type_is_parsed_to_the_engines_numbers(
        self, live: LiveService, make: Callable[..., Any], questions: Any
    ) -> None:
        result = make(live.url, live.token).system_one(STATE, questions)
        expected = fake_predict({"state": STATE, "questions": RAW_QUESTIONS})["answers"]
        refund, team, anger = (
            result.nouls["refund"],
            result.choices["team"],
            result.scores["anger"],
        )
        assert refund.noul == expected["refund"]["noul"]
        assert team.choice == expected["team"]["choice"]
        assert team.probabilities == expected["team"]["probabilities"]
        assert team.confidence == expected["team"]["confidence"]
        assert anger.score == expected["anger"]["score"]
        assert anger.legend == {0: "no", 1: "yes"}
        assert anger.score == pytest.approx(anger.probabilities[1], abs=1e-9)
        assert result.model == SERVED_AS
        assert result.usage.input_tokens > 0
        assert result.usage.output_tokens == 3

    @pytest.mark.parametrize("state", [{"a": [1, None]}, ["x", {"y": True}], "text"])
    def test_every_kind_of_state_is_taken(
        self, live: LiveService, make: Callable[..., Any], state: Any
    ) -> None:
        result = make(live.url, live.token).system_one(state, RAW_QUESTIONS)
        assert result.answers.keys() == RAW_QUESTIONS.keys()

    def test_request_id_is_there_and_a_plain_one_is_echoed(
        self, live: LiveService, make: Callable[..., Any]
    ) -> None:
        client = make(live.url, live.token)
        assert len(client.system_one(STATE, RAW_QUESTIONS).request_id) == 16
        headers = {"x-typesafe-request-id": "caller-1.2_3"}
        result = client.system_one(STATE, RAW_QUESTIONS, extra_headers=headers)
        assert result.request_id == "caller-1.2_3"

    def test_models_are_listed_with_the_alias_and_the_real_name(
        self, live: LiveService, make: Callable[..., Any]
    ) -> None:
        models = make(live.url, live.token).list_models().models
        assert [model.name for model in models] == ["jev-latest", SERVED_AS]

    def test_a_large_body_goes_out_as_zstd_and_is_answered(
        self, live: LiveService, make: Callable[..., Any]
    ) -> None:
        state = "a long state, " * 500
        client = make(live.url, live.token, compression="zstd")
        result = client.system_one(state, RAW_QUESTIONS)
        sent = result.raw_http_response.request
        assert sent.headers["content-encoding"] == "zstd"
        assert len(sent.content) < len(state)
        expected = fake_predict({"state": state, "questions": RAW_QUESTIONS})["answers"]
        assert result.nouls["refund"].noul == expected["refund"]["noul"]


class TestErrors:
    def test_a_wrong_key_is_an_authentication_error(
        self, live: LiveService, make: Callable[..., Any]
    ) -> None:
        with pytest.raises(sdk.TypeSafeAuthenticationError) as caught:
            make(live.url, "not-the-token").system_one(STATE, RAW_QUESTIONS)
        assert caught.value.status == 401
        assert caught.value.body["error"]["code"] == "unauthorized"
        assert caught.value.request_id is not None

    def test_a_bad_request_is_told_once_with_its_message(
        self, make: Callable[..., Any]
    ) -> None:
        with serve() as live:
            with pytest.raises(sdk.TypeSafeUnprocessableEntityError) as caught:
                make(live.url, live.token).system_one("", RAW_QUESTIONS)
            assert live.count("invalid_request", 1) == 1
        assert "state must be a nonempty" in str(caught.value)

    def test_an_image_is_refused_and_not_retried(
        self, live: LiveService, make: Callable[..., Any]
    ) -> None:
        with pytest.raises(sdk.TypeSafeUnprocessableEntityError) as caught:
            make(live.url, live.token).system_one(
                STATE, RAW_QUESTIONS, extra_body={"assets": {}}
            )
        assert caught.value.body["error"]["message"] == "images not supported"


class TestBusy:
    def test_retry_after_is_what_the_error_carries(
        self, make: Callable[..., Any]
    ) -> None:
        with serve(max_queue=1) as live:
            live.service.admission.enter()
            with pytest.raises(sdk.TypeSafeRateLimitError) as caught:
                make(live.url, live.token).system_one(
                    STATE, RAW_QUESTIONS, retry=NO_RETRY
                )
            live.service.admission.leave()
        assert caught.value.retry_after_ms == 1000

    def test_its_own_retry_clears_a_429(self, make: Callable[..., Any]) -> None:
        with serve(max_queue=1) as live:
            live.service.admission.enter()
            results: list[Any] = []
            client = make(live.url, live.token)
            caller = threading.Thread(
                target=lambda: results.append(client.system_one(STATE, RAW_QUESTIONS))
            )
            caller.start()
            live.count("busy", 1)
            live.service.admission.leave()
            caller.join()
            assert (live.count("busy", 1), live.count("ok", 1)) == (1, 1)
        assert results[0].answers.keys() == RAW_QUESTIONS.keys()
