"""POST /v1/embeddings, /pooling, /classify, /score and /rerank."""

from __future__ import annotations

import base64

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from engine.api.endpoints import endpoint, json_response, model_of, read_body
from engine.api.http.connection import while_connected
from engine.api.pooling.bodies import (
    ClassificationRequest,
    ClassOfInput,
    Embedding,
    EmbeddingRequest,
    Item,
    PooledData,
    PooledList,
    PoolingBody,
    PoolingRequest,
    Ranked,
    RankedDocument,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
)
from engine.api.pooling.call import PoolingCall

router = APIRouter()


@endpoint(router, "POST", "/v1/embeddings", body=EmbeddingRequest)
async def embeddings(request: Request) -> Response:
    """One vector for each input."""
    body = await read_body(request, EmbeddingRequest)
    call = _call(request, body, "embd")

    async def answer() -> Response:
        found = await call.of_inputs(body, body.params("embed", body.dimensions))
        data = [
            Embedding(index=number, embedding=_numbers(vector, body.encoding_format))
            for number, vector in enumerate(found)
        ]
        return _listed(call, data)

    return await while_connected(request, answer())


@endpoint(router, "POST", "/pooling", body=PoolingRequest)
async def pooling(request: Request) -> Response:
    """The model's output for each input, by task: a vector, classes, or either for each token."""
    body = await read_body(request, PoolingRequest)
    call = _call(request, body, "pool")

    async def answer() -> Response:
        found = await call.of_inputs(body, body.params(body.task, body.dimensions))
        data = [
            PooledData(index=number, data=_numbers(array, body.encoding_format))
            for number, array in enumerate(found)
        ]
        return _listed(call, data)

    return await while_connected(request, answer())


@endpoint(router, "POST", "/classify", body=ClassificationRequest)
async def classify(request: Request) -> Response:
    """The probabilities of the model's classes for each input."""
    body = await read_body(request, ClassificationRequest)
    call = _call(request, body, "classify")

    async def answer() -> Response:
        found = await call.of_inputs(body, body.params("classify"))
        labels = call.about.labels
        data = [
            ClassOfInput(
                index=number,
                label=labels[int(probs.argmax())],
                probs=probs.tolist(),
                num_classes=len(probs),
            )
            for number, probs in enumerate(found)
        ]
        return _listed(call, data)

    return await while_connected(request, answer())


@endpoint(router, "POST", "/score", "/v1/score", body=ScoreRequest)
async def score(request: Request) -> Response:
    """How well texts fit: a cross-encoder's score of each pair, or the cosine of two embeddings."""
    body = await read_body(request, ScoreRequest)
    call = _call(request, body, "score")

    async def answer() -> Response:
        found = await call.scores(body.firsts(), body.seconds(), ("queries", "documents"))
        data = [Score(index=number, score=value) for number, value in enumerate(found)]
        return _listed(call, data)

    return await while_connected(request, answer())


@endpoint(router, "POST", "/rerank", "/v1/rerank", "/v2/rerank", body=RerankRequest)
async def rerank(request: Request) -> Response:
    """Ranks documents by how well they fit a query, the best first."""
    body = await read_body(request, RerankRequest)
    call = _call(request, body, "rerank")

    async def answer() -> Response:
        texts = body.texts()
        scored = await call.shortened(texts, body.max_tokens_per_doc) if body.max_tokens_per_doc else texts
        found = await call.scores([body.query], scored, ("query", "documents"))
        order = sorted(range(len(texts)), key=lambda number: -found[number])[: body.top_n or None]
        results = [Ranked(index=number, relevance_score=found[number]) for number in order]
        if body.return_documents:
            for result in results:
                result.document = RankedDocument(text=texts[result.index])
        return json_response(Ranking(id=call.id, model=call.model.name, usage=call.usage, results=results))

    return await while_connected(request, answer())


def _call(request: Request, body: PoolingBody, prefix: str) -> PoolingCall:
    model = model_of(request, body.model)
    return PoolingCall(model, body, request.headers, request.state.request_id, prefix)


def _listed(call: PoolingCall, data: list[Item]) -> Response:
    return json_response(
        PooledList(id=call.id, created=call.created, model=call.model.name, data=data, usage=call.usage)
    )


def _numbers(array: npt.NDArray[np.float32], encoding: str) -> list[float] | str:
    """The numbers as JSON, or as little-endian fp32 in base64."""
    if encoding == "base64":
        return base64.b64encode(array.astype("<f4").tobytes()).decode()
    numbers: list[float] = array.tolist()
    return numbers
