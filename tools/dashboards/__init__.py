"""The Grafana dashboards of deploy/grafana, as tables."""
