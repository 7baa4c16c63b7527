//! The CUDA sources of `kernels/`, embedded at build time.

use std::collections::HashMap;

use pyo3::prelude::*;

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// File name to text of every CUDA source.
#[pyfunction]
pub(crate) fn kernel_sources() -> HashMap<&'static str, &'static str> {
    SOURCES.iter().copied().collect()
}
