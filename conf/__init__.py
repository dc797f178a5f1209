"""The configuration groups; a package, so that Hydra finds them inside an installation."""
