"""/invocations: one route, told apart by what the body holds."""

from __future__ import annotations

from .serving import Server, check


def test_the_body_says_what_is_meant() -> None:
    async def test(server: Server) -> None:
        texts = await server.answer("/invocations", prompt="Hello there", max_tokens=3)
        assert texts["object"] == "text_completion"
        chat = await server.answer("/invocations", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
        assert chat["object"] == "chat.completion"

    check(test)


def test_errors_are_those_of_the_route_that_is_meant() -> None:
    async def test(server: Server) -> None:
        response = await server.post("/invocations", {"prompt": "x", "temperature": 9})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "temperature")
        response = await server.post("/invocations", {"something": "x"})
        assert response.status_code == 400
        assert "messages, prompt" in response.json()["error"]["message"]
        response = await server.client.post(
            "/invocations", content=b"[1]", headers={"content-type": "application/json"}
        )
        assert response.status_code == 400

    check(test)
