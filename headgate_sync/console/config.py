"""`ConsoleConfig`, the settings of the console."""

from __future__ import annotations

from attrs import field, frozen, validators

from headgate_sync.api.config import ApiConfig


@frozen(kw_only=True)
class ConsoleConfig:
    """How the pages look; who may do what is the API's to decide.

    Attributes:
        api: settings of the control API below the same mount, which the pages read
            from and act through: its hooks, `read_only` and limits hold for the pages.
        title: shown on every page, to tell one environment from another.
    """

    api: ApiConfig = field(
        factory=ApiConfig, validator=validators.instance_of(ApiConfig)
    )
    title: str = field(default="headgate", validator=validators.instance_of(str))
