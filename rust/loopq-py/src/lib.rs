//! Python binding of `loopq-core`: conversions and one door, no arithmetic.
#![allow(clippy::needless_pass_by_value)] // PyO3 hands arguments over by value

mod door;
mod full;
mod hessian;
mod kernels;
mod packing;
mod solving;

use loopq_core::simd::Isa;
use pyo3::prelude::*;

/// The instruction sets found on this machine, the one in use last.
#[pyfunction]
fn cpu_features() -> Vec<String> {
    Isa::available().into_iter().map(|isa| isa.name().to_string()).collect()
}

#[pymodule]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("BLOCK_ROWS", loopq_core::hessian::BLOCK_ROWS)?;
    m.add_function(wrap_pyfunction!(cpu_features, m)?)?;
    m.add_function(wrap_pyfunction!(kernels::kernel_sources, m)?)?;
    m.add_class::<hessian::HessianAccumulator>()?;
    m.add_class::<solving::Factor>()?;
    m.add_class::<full::Prepared>()?;
    m.add_class::<full::FullSettings>()?;
    m.add_function(wrap_pyfunction!(full::full, m)?)?;
    m.add_function(wrap_pyfunction!(full::coupled, m)?)?;
    m.add_function(wrap_pyfunction!(solving::rtn, m)?)?;
    m.add_function(wrap_pyfunction!(solving::gptq, m)?)?;
    m.add_function(wrap_pyfunction!(solving::dequantize, m)?)?;
    m.add_function(wrap_pyfunction!(solving::proxy, m)?)?;
    m.add_function(wrap_pyfunction!(solving::eigvalsh, m)?)?;
    m.add_function(wrap_pyfunction!(packing::pack_dense, m)?)?;
    m.add_function(wrap_pyfunction!(packing::unpack_dense, m)?)?;
    m.add_function(wrap_pyfunction!(packing::marlin_pack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::marlin_unpack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::w4_pack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::w4_unpack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::w4_from_marlin, m)?)?;
    Ok(())
}
