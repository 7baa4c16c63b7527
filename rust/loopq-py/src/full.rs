//! The full solver.

use loopq_core::solve::{self, Cost, Order};
use numpy::{PyArray1, PyArray2, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::door::{raise, run};
use crate::hessian::matrix;
use crate::solving::{grid_of, result, HArray};

/// A damped Hessian in its order, factored, to be shared by layers with the same input.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct Prepared {
    inner: solve::Prepared,
}

#[pymethods]
impl Prepared {
    #[new]
    #[pyo3(signature = (h, mu, *, order = "conditional", threads = 0, progress = None))]
    fn new<'py>(
        py: Python<'py>,
        h: &Bound<'py, PyAny>,
        mu: PyReadonlyArray1<'py, f64>,
        order: &str,
        threads: usize,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Self> {
        let (array, dim) = HArray::take(py, h)?;
        let (view, mu) = (array.view()?, mu.as_slice()?);
        let order = Order::parse(order).map_err(|e| raise(py, &e))?;
        let inner = run(py, progress, |watch| solve::Prepared::new(view, mu, dim, order, threads, watch))?;
        Ok(Self { inner })
    }

    #[pyo3(signature = (w, cross, alpha, *, threads = 0, progress = None))]
    fn shift<'py>(
        &self,
        py: Python<'py>,
        w: PyReadonlyArray2<'py, f32>,
        cross: PyReadonlyArray2<'py, f64>,
        alpha: f64,
        threads: usize,
        progress: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let (rows, dim) = (w.shape()[0], w.shape()[1]);
        let (values, cross) = (w.as_slice()?, cross.as_slice()?);
        let out = run(py, progress, |watch| self.inner.shift(values, rows, cross, alpha, threads, watch))?;
        matrix(py, out, [rows, dim])
    }

    #[getter]
    fn dim(&self) -> usize {
        self.inner.dim()
    }

    #[getter]
    fn order<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<i64>> {
        PyArray1::from_iter(py, self.inner.order().iter().map(|&c| c as i64))
    }

    #[getter]
    fn conditional<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<f64>> {
        PyArray1::from_slice(py, self.inner.conditional())
    }
}

/// What the full solver is asked, for one layer or many.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct FullSettings {
    inner: solve::FullSettings,
}

#[pymethods]
impl FullSettings {
    #[new]
    #[pyo3(signature = (*, bits, group_size, symmetric, signed, scale_dtype, cost, sweeps, rounds, refit))]
    fn new(
        py: Python<'_>,
        bits: u32,
        group_size: i64,
        symmetric: bool,
        signed: bool,
        scale_dtype: &str,
        cost: &str,
        sweeps: usize,
        rounds: usize,
        refit: bool,
    ) -> PyResult<Self> {
        // The solver takes its search from `cost`.
        let grid = grid_of(py, bits, group_size, symmetric, scale_dtype, "mse")?;
        let cost = Cost::parse(cost).map_err(|e| raise(py, &e))?;
        Ok(Self { inner: solve::FullSettings { grid, signed, cost, sweeps, rounds, refit } })
    }
}

#[pyfunction]
#[pyo3(signature = (w, prepared, settings, *, threads = 0, progress = None))]
pub(crate) fn full<'py>(
    py: Python<'py>,
    w: PyReadonlyArray2<'py, f32>,
    prepared: &Bound<'py, Prepared>,
    settings: &Bound<'py, FullSettings>,
    threads: usize,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let settings = &settings.get().inner;
    let (rows, values) = (w.shape()[0], w.as_slice()?);
    let shared = &prepared.get().inner;
    let (out, report) =
        run(py, progress, |watch| solve::full(values, rows, shared, settings, threads, watch))?;
    let dict = result(py, out, &settings.grid, rows, shared.dim())?;
    dict.set_item("proxy_swept", report.swept)?;
    dict.set_item("proxy_descended", report.descended)?;
    dict.set_item("proxy_refitted", report.refitted)?;
    dict.set_item("proxy_settled", report.settled)?;
    dict.set_item("n_moves", report.moves)?;
    dict.set_item("n_rounds", report.rounds)?;
    Ok(dict)
}

/// A block's metric between outputs, borrowed for the time of a solve.
fn lefts<'a>(left: &'a [PyRef<'_, Prepared>]) -> Vec<&'a solve::Prepared> {
    left.iter().map(|l| &l.inner).collect()
}

#[pyfunction]
#[pyo3(signature = (w, prepared, left, settings, *, passes = 1, threads = 0, progress = None))]
pub(crate) fn coupled<'py>(
    py: Python<'py>,
    w: PyReadonlyArray2<'py, f32>,
    prepared: &Bound<'py, Prepared>,
    left: Vec<PyRef<'py, Prepared>>,
    settings: &Bound<'py, FullSettings>,
    passes: usize,
    threads: usize,
    progress: Option<&Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let settings = &settings.get().inner;
    let (rows, values) = (w.shape()[0], w.as_slice()?);
    let (shared, left) = (&prepared.get().inner, lefts(&left));
    let (out, report) = run(py, progress, |watch| {
        solve::coupled(values, rows, shared, &left, settings, passes, threads, watch)
    })?;
    let dict = result(py, out, &settings.grid, rows, shared.dim())?;
    dict.set_item("coupled_swept", report.swept)?;
    dict.set_item("coupled_settled", report.settled)?;
    dict.set_item("n_replaced", report.replaced)?;
    Ok(dict)
}
