# SPDX-License-Identifier: Apache-2.0
"""The routes of the web page and its files."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response

from kvrouter.router.base.common.errors import NotFound
from kvrouter.router.base.common.escaping import printable
from kvrouter.router.serve.page.page_files import FILES, INDEX, PAGE, PageFile


def page_routes(files: Mapping[str, PageFile]) -> APIRouter:
    """Return the routes that serve these files, by their names."""
    router = APIRouter()

    @router.get(PAGE, include_in_schema=False)
    async def page(request: Request) -> Response:
        return _file(request, files[INDEX])

    @router.get(f"{FILES}{{name}}", include_in_schema=False)
    async def file(request: Request, name: str) -> Response:
        page_file = files.get(name)
        if page_file is None:
            raise NotFound(f"the page has no file {printable(name)}")
        return _file(request, page_file)

    return router


def _file(request: Request, file: PageFile) -> Response:
    """Return the answer with a file, or a 304 without content if the browser already has this version."""
    if file.headers["etag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)
