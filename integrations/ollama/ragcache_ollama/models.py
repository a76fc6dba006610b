"""/api/tags, /api/ps, /api/show and /api/version: the models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter

from ragcache.models.language_model import LanguageModel
from ragcache.models.thoughts import thinking_of
from ragcache.server.http_errors import ApiError
from ragcache.server.service import Service, ServiceParam
from ragcache_ollama.bodies import Details, ModelEntries, ModelEntry, Shown, ShowRequest, Version
from ragcache_ollama.form import LATEST, AnyTypeRoute, failures, served_name

API_VERSION = "0.12.11"
"""The version of Ollama's API that is served: clients read it to learn which requests they may send."""


NEVER = "9999-12-31T23:59:59Z"
EMBEDDER = "embedder"
"""The family of an embedding model; its actual architecture is not given."""


router = APIRouter(route_class=AnyTypeRoute)


@router.get("/tags", summary="The models", responses=failures())
async def list_models(service: ServiceParam) -> ModelEntries:
    return ModelEntries(models=entries(service))


@router.get("/ps", summary="The models that are loaded: all", responses=failures())
async def list_loaded(service: ServiceParam) -> ModelEntries:
    longest = service.kb.lm.max_positions
    more = {"expires_at": NEVER, "size_vram": weight_bytes(service), "context_length": longest}
    return ModelEntries(models=[one.model_copy(update=more) for one in entries(service)])


@router.post("/show", summary="One model", responses=failures(400, 404, 413))
async def show_model(service: ServiceParam, asked: ShowRequest) -> Shown:
    given = asked.model or asked.name
    if given is None:
        raise ApiError(400, "'model' is missing", "missing_required_parameter", "model")
    name, lm = served_name(service, given), service.kb.lm
    embeds = name == service.embedding_model
    if not embeds:
        service.retrieves(name)
    template = str(lm.tokenizer.chat_template or "")
    capabilities = ["completion", "tools" if "tools" in template else "", thinking_of(lm.tokenizer) and "thinking"]
    family = str(lm.config.model_type)
    about: dict[str, Any] = {"general.architecture": family}
    if embeds:
        about = {"general.architecture": EMBEDDER, f"{EMBEDDER}.embedding_length": service.kb.embedder.dimension}
    else:
        about |= {"general.parameter_count": parameters(service), f"{family}.context_length": lm.max_positions}
    return Shown(
        modelfile="",
        parameters="",
        template="" if embeds else template,
        details=details(service, embeds=embeds),
        model_info=about,
        capabilities=["embedding"] if embeds else [one for one in capabilities if one],
        modified_at=started(service),
    )


@router.get("/version", summary="The version of Ollama's API", responses=failures())
async def version() -> Version:
    return Version(version=API_VERSION)


def entries(service: Service) -> list[ModelEntry]:
    digests = {service.embedding_model: hashlib.sha256(service.embedding_model.encode()).hexdigest()}
    return [
        ModelEntry(
            name=name if ":" in name else name + LATEST,
            model=name if ":" in name else name + LATEST,
            modified_at=started(service),
            size=0 if name == service.embedding_model else weight_bytes(service),
            digest=digests.get(name, service.kb.lm.fingerprint),
            details=details(service, embeds=name == service.embedding_model),
        )
        for name in (service.chat_model, service.plain_model, service.embedding_model)
    ]


def started(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")


def weight_bytes(service: Service) -> int:
    lm = service.kb.lm
    return sum(one.nbytes for one in lm.model.parameters()) if isinstance(lm, LanguageModel) else 0


def parameters(service: Service) -> int:
    lm = service.kb.lm
    return sum(one.numel() for one in lm.model.parameters()) if isinstance(lm, LanguageModel) else 0


def details(service: Service, *, embeds: bool) -> Details:
    lm = service.kb.lm
    family = EMBEDDER if embeds else str(lm.config.model_type)
    return Details(
        parent_model="",
        format="",
        family=family,
        families=[family],
        parameter_size="" if embeds else f"{parameters(service) / 1e6:.0f}M",
        quantization_level="" if embeds else str(getattr(lm, "dtype", "")).removeprefix("torch."),
    )
