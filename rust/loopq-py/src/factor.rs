//! The damped factor that solvers share, eigenvalues and their number.

use loopq_core::factor::{self, DampedHessian, Order};
use loopq_core::{Error, Execution};
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;

use crate::arrays::{matrix, vector, Hessian, Matrix, Vector};
use crate::gil::{allow_threads, raise};

/// A factor in either precision.
pub(crate) enum AnyFactor {
    F32(factor::DampedFactor<f32>),
    F64(factor::DampedFactor<f64>),
}

/// `H + diag(mu)`, its columns in an order, factored once for all layers with the same input.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct DampedFactor {
    inner: AnyFactor,
    /// `H` in C order: what is needed of it beside the factor is made when a solver asks.
    hessian: Py<PyAny>,
}

#[pymethods]
impl DampedFactor {
    #[new]
    #[pyo3(signature = (h, mu, *, order = "natural", precision = "float64", threads = 0))]
    fn new<'py>(
        py: Python<'py>,
        h: &Bound<'py, PyAny>,
        mu: &Bound<'py, PyAny>,
        order: &str,
        precision: &str,
        threads: usize,
    ) -> PyResult<Self> {
        let order = Order::parse(order).map_err(|e| raise(py, &e))?;
        let (hessian, mu) = (Hessian::take(h)?, Vector::take("mu", mu)?);
        let (view, mu) = (hessian.view(py)?, mu.values()?);
        let inner = allow_threads(py, |cancel| {
            let execution = Execution { threads, cancel };
            match precision {
                "float64" => Ok(AnyFactor::F64(factor::DampedFactor::new(view, mu, order, &execution)?)),
                "float32" => Ok(AnyFactor::F32(factor::DampedFactor::new(view, mu, order, &execution)?)),
                other => Err(precision_error(other, "'float32', 'float64'")),
            }
        })?;
        Ok(Self { inner, hessian: hessian.unbind() })
    }

    #[pyo3(signature = (w, cross, alpha, *, threads = 0))]
    fn shift<'py>(
        &self,
        py: Python<'py>,
        w: &Bound<'py, PyAny>,
        cross: &Bound<'py, PyAny>,
        alpha: f64,
        threads: usize,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let factor = self.double(py)?;
        let (w, cross) = (Matrix::take("w", w)?, Matrix::take("cross", cross)?);
        let weight = w.weight(py, "W")?;
        cross.check_shape(py, "C", [factor.dim(); 2])?;
        let cross = cross.values()?;
        let out =
            allow_threads(py, |cancel| factor.shift(weight, cross, alpha, &Execution { threads, cancel }))?;
        matrix(py, out, [weight.rows(), weight.dim()])
    }
}

impl DampedFactor {
    pub(crate) fn inner(&self) -> &AnyFactor {
        &self.inner
    }

    /// The factor in double precision, which is the only one that some take.
    pub(crate) fn double(&self, py: Python<'_>) -> PyResult<&factor::DampedFactor<f64>> {
        match &self.inner {
            AnyFactor::F64(factor) => Ok(factor),
            AnyFactor::F32(_) => {
                Err(raise(py, &precision_error("float32", "'float64'; only gptq takes others")))
            }
        }
    }

    /// Factor and `H`; its array is borrowed through `hessian`.
    pub(crate) fn damped<'a>(
        &'a self,
        py: Python<'_>,
        hessian: &'a Hessian<'_>,
    ) -> PyResult<DampedHessian<'a>> {
        DampedHessian::new(hessian.view(py)?, self.double(py)?).map_err(|e| raise(py, &e))
    }

    /// The array that the factor was made of.
    pub(crate) fn hessian<'py>(&self, py: Python<'py>) -> PyResult<Hessian<'py>> {
        Hessian::take(self.hessian.bind(py))
    }
}

fn precision_error(got: &str, allowed: &str) -> Error {
    Error::Setting { name: "precision", got: format!("{got:?}"), allowed: allowed.to_string() }
}

#[pyfunction]
#[pyo3(signature = (h, threads = 0))]
pub(crate) fn eigvalsh<'py>(
    py: Python<'py>,
    h: &Bound<'py, PyAny>,
    threads: usize,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let hessian = Hessian::take(h)?;
    let view = hessian.view(py)?;
    let values = allow_threads(py, |cancel| factor::eigvalsh(view, &Execution { threads, cancel }))?;
    vector(py, values)
}

#[pyfunction]
#[pyo3(signature = (h, fractions, threads = 0))]
pub(crate) fn count_above(
    py: Python<'_>,
    h: &Bound<'_, PyAny>,
    fractions: Vec<f64>,
    threads: usize,
) -> PyResult<(f64, Vec<usize>)> {
    let hessian = Hessian::take(h)?;
    let view = hessian.view(py)?;
    let found =
        allow_threads(py, |cancel| factor::count_above(view, &fractions, &Execution { threads, cancel }))?;
    Ok((found.largest, found.above))
}
