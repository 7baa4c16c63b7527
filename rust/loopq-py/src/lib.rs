//! Python binding of `loopq-core` and `loopq-cpu`: conversions, the interpreter lock, and no arithmetic.
#![allow(clippy::needless_pass_by_value)] // PyO3 hands arguments over by value

mod arrays;
mod factor;
mod gil;
mod grid;
mod hessian;
mod kernels;
mod matmul;
mod packing;
mod reserve;
mod runner;
mod solve;

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
    m.add("BEAM_COLUMNS", loopq_core::gptq::BEAM_COLUMNS)?;
    m.add("BEAM_STRIP", loopq_core::gptq::BEAM_STRIP)?;
    m.add("BLOCK_SIZE", loopq_core::gptq::BLOCK_SIZE)?;
    m.add("LANES", loopq_core::coordinate::LANES)?;
    m.add("PIVOTS", loopq_core::factor::PIVOTS)?;
    m.add("SETTLED", loopq_core::coordinate::SETTLED)?;
    m.add("SHRINK_STEPS", loopq_core::grid::SHRINK_STEPS)?;
    m.add("TOGETHER", loopq_core::coordinate::TOGETHER)?;
    m.add("TURNS", loopq_core::coordinate::TURNS)?;
    m.add("HESSIAN_VERSION", loopq_core::hessian::SPEC_VERSION)?;
    m.add("ROW_LIMIT", loopq_core::hessian::ROW_LIMIT)?;
    m.add_function(wrap_pyfunction!(cpu_features, m)?)?;
    m.add_function(wrap_pyfunction!(kernels::kernel_sources, m)?)?;
    m.add_class::<grid::Grid>()?;
    m.add_class::<hessian::HessianAccumulator>()?;
    m.add_class::<factor::DampedFactor>()?;
    m.add_class::<matmul::CpuLayout>()?;
    m.add_function(wrap_pyfunction!(matmul::cpu_engines, m)?)?;
    m.add_function(wrap_pyfunction!(matmul::cpu_read, m)?)?;
    m.add_class::<runner::CpuRunner>()?;
    m.add_class::<solve::Settings>()?;
    m.add_function(wrap_pyfunction!(factor::count_above, m)?)?;
    m.add_function(wrap_pyfunction!(factor::eigvalsh, m)?)?;
    m.add_function(wrap_pyfunction!(grid::rtn, m)?)?;
    m.add_function(wrap_pyfunction!(grid::dequantize, m)?)?;
    m.add_function(wrap_pyfunction!(grid::fit_levels, m)?)?;
    m.add_function(wrap_pyfunction!(solve::gptq, m)?)?;
    m.add_function(wrap_pyfunction!(solve::coordinate, m)?)?;
    m.add_function(wrap_pyfunction!(solve::coupled, m)?)?;
    m.add_function(wrap_pyfunction!(solve::trellis, m)?)?;
    m.add_function(wrap_pyfunction!(solve::proxy, m)?)?;
    m.add_function(wrap_pyfunction!(packing::pack_dense, m)?)?;
    m.add_function(wrap_pyfunction!(packing::unpack_dense, m)?)?;
    m.add_function(wrap_pyfunction!(packing::marlin_pack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::marlin_unpack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::w4_pack, m)?)?;
    m.add_function(wrap_pyfunction!(packing::w4_unpack, m)?)?;
    Ok(())
}
