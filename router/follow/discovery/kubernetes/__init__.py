# SPDX-License-Identifier: Apache-2.0
"""Workers from pods of a Kubernetes cluster."""
