//! Solvers under a Hessian, and the loss that they lower.

use loopq_core::factor::DampedHessian;
use loopq_core::gptq::{Options, Report, Scales, BLOCK_SIZE};
use loopq_core::simd::{Isa, Real};
use loopq_core::{factor, Execution};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::{Hessian, Matrix};
use crate::factor::{AnyFactor, DampedFactor};
use crate::gil::{allow_threads, raise};
use crate::grid::{result, Grid};

#[pyfunction]
#[pyo3(signature = (w, factor, grid, *, scales = "group", block_size = BLOCK_SIZE, threads = 0))]
pub(crate) fn gptq<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    factor: &Bound<'py, DampedFactor>,
    grid: &Bound<'py, Grid>,
    scales: &str,
    block_size: usize,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let grid = &grid.get().inner;
    let scales = Scales::parse(scales).map_err(|e| raise(py, &e))?;
    let options = Options { scales, block_size, beam: 1, isa: Isa::best() };
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let factor = factor.get().inner();
    let (out, report) = allow_threads(py, |cancel| {
        let execution = Execution { threads, cancel };
        match factor {
            AnyFactor::F32(f) => loopq_core::gptq::gptq(weight, f, grid, &options, &execution),
            AnyFactor::F64(f) => loopq_core::gptq::gptq(weight, f, grid, &options, &execution),
        }
    })?;
    let dict = result(py, out, grid, weight.rows(), weight.dim())?;
    match factor {
        AnyFactor::F32(f) => describe(&dict, f, report)?,
        AnyFactor::F64(f) => describe(&dict, f, report)?,
    }
    Ok(dict)
}

fn describe<T: Real>(
    dict: &Bound<'_, PyDict>,
    factor: &factor::DampedFactor<T>,
    report: Report,
) -> PyResult<()> {
    let pivots = factor.pivots();
    dict.set_item("damping_abs", factor.mu().iter().copied().fold(0.0, f64::max))?;
    dict.set_item("n_dead_columns", factor.n_dead_columns())?;
    dict.set_item("min_pivot", pivots.iter().copied().fold(f64::INFINITY, f64::min))?;
    dict.set_item("max_pivot", pivots.iter().copied().fold(0.0, f64::max))?;
    dict.set_item("proxy", report.proxy)?;
    dict.set_item("proxy_damped", report.proxy_damped)
}

/// Settings of GPTQ with coordinate descent, for one layer or many.
#[pyclass(frozen, module = "loopq._native", name = "GptqCdSettings")]
pub(crate) struct Settings {
    inner: loopq_core::coordinate::Settings,
}

#[pymethods]
impl Settings {
    #[new]
    #[pyo3(signature = (grid, *, beam, sweeps, rounds, refit))]
    fn new(grid: &Bound<'_, Grid>, beam: usize, sweeps: usize, rounds: usize, refit: bool) -> Self {
        let grid = grid.get().inner;
        Self { inner: loopq_core::coordinate::Settings { grid, beam, sweeps, rounds, refit } }
    }
}

#[pyfunction]
#[pyo3(name = "gptq_cd", signature = (w, factor, settings, *, threads = 0))]
pub(crate) fn coordinate<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    factor: &Bound<'py, DampedFactor>,
    settings: &Bound<'py, Settings>,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let settings = &settings.get().inner;
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let hessian = factor.get().hessian(py)?;
    let input = factor.get().damped(py, &hessian)?;
    let (out, report) = allow_threads(py, |cancel| {
        loopq_core::coordinate::coordinate(weight, &input, settings, &Execution { threads, cancel })
    })?;
    let dict = result(py, out, &settings.grid, weight.rows(), weight.dim())?;
    dict.set_item("proxy_swept", report.swept)?;
    dict.set_item("proxy_settled", report.settled)?;
    dict.set_item("n_moves", report.moves)?;
    dict.set_item("n_rounds", report.rounds)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (w, factor, left, settings, *, passes = 1, threads = 0))]
pub(crate) fn coupled<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    factor: &Bound<'py, DampedFactor>,
    left: Vec<Bound<'py, DampedFactor>>,
    settings: &Bound<'py, Settings>,
    passes: usize,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let settings = &settings.get().inner;
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let hessian = factor.get().hessian(py)?;
    let input = factor.get().damped(py, &hessian)?;
    let blocks: Vec<Hessian<'py>> = left.iter().map(|l| l.get().hessian(py)).collect::<PyResult<_>>()?;
    let left = left.iter().zip(&blocks).map(|(l, block)| l.get().damped(py, block));
    let left: Vec<DampedHessian<'_>> = left.collect::<PyResult<_>>()?;
    let (out, report) = allow_threads(py, |cancel| {
        loopq_core::coordinate::coupled(
            weight,
            &input,
            &left,
            settings,
            passes,
            &Execution { threads, cancel },
        )
    })?;
    let dict = result(py, out, &settings.grid, weight.rows(), weight.dim())?;
    dict.set_item("coupled_swept", report.swept)?;
    dict.set_item("coupled_settled", report.settled)?;
    dict.set_item("n_replaced", report.replaced)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (w, factor, left, grid, *, threads = 0))]
pub(crate) fn trellis<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    factor: &Bound<'py, DampedFactor>,
    left: Vec<Bound<'py, DampedFactor>>,
    grid: &Bound<'py, Grid>,
    threads: usize,
) -> PyResult<Bound<'py, PyDict>> {
    let grid = &grid.get().inner;
    let w = Matrix::take("w", w)?;
    let weight = w.weight(py, "W")?;
    let hessian = factor.get().hessian(py)?;
    let input = factor.get().damped(py, &hessian)?;
    let blocks: Vec<Hessian<'py>> = left.iter().map(|l| l.get().hessian(py)).collect::<PyResult<_>>()?;
    let left = left.iter().zip(&blocks).map(|(l, block)| l.get().damped(py, block));
    let left: Vec<DampedHessian<'_>> = left.collect::<PyResult<_>>()?;
    let (out, report) = allow_threads(py, |cancel| {
        let execution = Execution { threads, cancel };
        loopq_core::trellis::solve(weight, &input, &left, grid, &execution)
    })?;
    let dict = result(py, out, grid, weight.rows(), weight.dim())?;
    dict.set_item("coupled_swept", report.swept)?;
    dict.set_item("coupled_settled", report.settled)?;
    Ok(dict)
}

#[pyfunction]
#[pyo3(signature = (w, w_hat, h, threads = 0))]
pub(crate) fn proxy<'py>(
    py: Python<'py>,
    w: &Bound<'py, PyAny>,
    w_hat: Option<&Bound<'py, PyAny>>,
    h: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<f64> {
    let (w, hessian) = (Matrix::take("w", w)?, Hessian::take(h)?);
    let w_hat = w_hat.map(|w_hat| Matrix::take("w_hat", w_hat)).transpose()?;
    let (weight, view) = (w.weight(py, "W")?, hessian.view(py)?);
    let hat = w_hat.as_ref().map(|w_hat| w_hat.weight(py, "W^")).transpose()?;
    allow_threads(py, |cancel| loopq_core::proxy(weight, hat, view, &Execution { threads, cancel }))
}
