"""Load reports in answers, as Envoy's ORCA has them: a balancer asks with a request header, and learns with each answer
how loaded this server is, without scraping it."""

from __future__ import annotations

import json

from quire.frontend.metrics.frontend_stats import FrontendStats

REQUEST_HEADER = "endpoint-load-metrics-format"
RESPONSE_HEADER = "endpoint-load-metrics"


def load_report(stats: FrontendStats, format: str) -> str | None:
    """The value of the response header; None for a format that is neither "text" nor "json"."""
    load = stats.get_load()
    named = {
        "kv_cache_usage_perc": load.kv_cache_usage,
        "num_requests_running": float(load.num_running),
        "num_requests_waiting": float(load.num_waiting),
    }
    utilization = round(load.saturation, 4)
    match format.strip().lower():
        case "text":
            pairs = [f"named_metrics.{name}={value:g}" for name, value in named.items()]
            return "TEXT " + ", ".join([f"application_utilization={utilization:g}", *pairs])
        case "json":
            return "JSON " + json.dumps({"application_utilization": utilization, "named_metrics": named})
        case _:
            return None
