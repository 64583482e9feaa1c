"""`kvlift demo`: quality on the tiny family, speed on the load pair, each on real workers."""

from router.demo.show import run_demo

__all__ = ["run_demo"]
