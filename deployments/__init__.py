"""The Serve application: gateway, router and the composition root that places the workers."""
