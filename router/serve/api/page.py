# SPDX-License-Identifier: Apache-2.0
"""The page and its files."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from kvrouter.router.base.common.errors import NotFound
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.serve.page.page_files import FILES, INDEX, PAGE, PageFile


def page_routes(files: Mapping[str, PageFile]) -> APIRouter:
    router = APIRouter()

    @router.get(PAGE, include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file(request, files[INDEX])

    @router.get(f"{FILES}{{name}}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        found = files.get(name)
        if found is None:
            raise NotFound(f"the page has no file {printable(name)}")
        return _file(request, found)

    return router


def _file(request: Request, file: PageFile) -> Response:
    if file.headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
