//! The Hessian accumulator as a Python class.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use half::f16;
use loopq_core::dump::{RowType, Rows};
use loopq_core::hessian::{Accumulator, MatrixState, Settings, State};
use loopq_core::simd::Isa;
use loopq_core::{Error, Watch};
use numpy::{PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArrayMethods};
use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::door::{raise, run};

/// `X^T X` summed over rows, per step, reproducibly.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct HessianAccumulator {
    inner: Mutex<Accumulator>,
}

impl HessianAccumulator {
    fn lock(&self) -> MutexGuard<'_, Accumulator> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A short look that needs no thread of its own.
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Accumulator) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| f(&self.lock())).map_err(|e| raise(py, &e))
    }

    fn wrap(inner: Accumulator) -> Self {
        Self { inner: Mutex::new(inner) }
    }
}

#[pymethods]
impl HessianAccumulator {
    #[new]
    #[pyo3(signature = (dim, steps, *, per_step, threads = 0, isa = None))]
    fn new(
        py: Python<'_>,
        dim: usize,
        steps: Vec<usize>,
        per_step: bool,
        threads: usize,
        isa: Option<&str>,
    ) -> PyResult<Self> {
        let isa = isa_named(py, isa)?;
        let made = Accumulator::new(Settings { dim, steps, per_step, threads, isa });
        Ok(Self::wrap(made.map_err(|e| raise(py, &e))?))
    }

    fn update(&self, py: Python<'_>, step: usize, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        if let Ok(rows) = rows.extract::<PyReadonlyArray2<'_, f32>>() {
            let (n, dim) = (rows.shape()[0], rows.shape()[1]);
            let values = rows.as_slice()?;
            return self.add(py, step, Rows::from_f32(values, n, dim));
        }
        if let Ok(rows) = rows.extract::<PyReadonlyArray2<'_, u16>>() {
            let (n, dim) = (rows.shape()[0], rows.shape()[1]);
            let values = rows.as_slice()?;
            return self.add(py, step, Rows::from_bits16(values, RowType::Bf16, n, dim));
        }
        if let Ok(rows) = rows.extract::<PyReadonlyArray2<'_, f16>>() {
            let (n, dim) = (rows.shape()[0], rows.shape()[1]);
            let values = rows.as_slice()?;
            return self.add(py, step, Rows::from_f16(values, n, dim));
        }
        Err(PyTypeError::new_err(
            "rows must be a C-contiguous (n, dim) array of float32, float16 or uint16 (bfloat16 bits)",
        ))
    }

    fn update_file(
        &self,
        py: Python<'_>,
        step: usize,
        path: PathBuf,
        offset: u64,
        n_rows: usize,
        dtype: &str,
    ) -> PyResult<()> {
        let dtype = RowType::parse(dtype).map_err(|e| raise(py, &e))?;
        run(py, None, |watch| self.lock().update_file(step, &path, offset, n_rows, dtype, watch))
    }

    fn add_products(
        &self,
        py: Python<'_>,
        n_rows: Vec<(usize, u64)>,
        products: PyReadonlyArray2<'_, f64>,
    ) -> PyResult<()> {
        let products = products.as_slice()?;
        py.detach(|| self.lock().add_products(&n_rows, products)).map_err(|e| raise(py, &e))
    }

    fn n_rows(&self, py: Python<'_>, step: usize) -> PyResult<u64> {
        self.read(py, |inner| inner.n_rows(step))
    }

    #[getter]
    fn dim(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |inner| Ok(inner.settings().dim))
    }

    #[getter]
    fn steps(&self, py: Python<'_>) -> PyResult<Vec<usize>> {
        self.read(py, |inner| Ok(inner.settings().steps.clone()))
    }

    #[getter]
    fn per_step(&self, py: Python<'_>) -> PyResult<bool> {
        self.read(py, |inner| Ok(inner.settings().per_step))
    }

    #[getter]
    fn nbytes(&self, py: Python<'_>) -> PyResult<usize> {
        self.read(py, |inner| Ok(inner.n_bytes()))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        run(py, None, |watch| self.lock().finish(watch))
    }

    #[pyo3(signature = (steps = None, *, dtype = "float64", weights = None))]
    fn matrix<'py>(
        &self,
        py: Python<'py>,
        steps: Option<Vec<usize>>,
        dtype: &str,
        weights: Option<Vec<f64>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let single = match dtype {
            "float32" => true,
            "float64" => false,
            other => {
                let allowed = "'float32', 'float64'".to_string();
                return Err(raise(py, &Error::Setting { name: "dtype", got: format!("{other:?}"), allowed }));
            }
        };
        let steps = steps.as_deref();
        let (dim, values) = run(py, None, |_| {
            let inner = self.lock();
            let values = match &weights {
                None => inner.matrix(steps)?,
                Some(weights) => inner.weighted(steps, weights)?,
            };
            Ok((inner.settings().dim, values))
        })?;
        if single {
            let narrow: Vec<f32> = loopq_core::hessian::narrow(&values);
            return Ok(PyArray1::from_vec(py, narrow).reshape([dim, dim])?.into_any());
        }
        Ok(PyArray1::from_vec(py, values).reshape([dim, dim])?.into_any())
    }

    #[pyo3(signature = (steps = None))]
    fn diagonal<'py>(
        &self,
        py: Python<'py>,
        steps: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        Ok(PyArray1::from_vec(py, self.read(py, |inner| inner.diagonal(steps.as_deref()))?))
    }

    #[pyo3(signature = (step = None))]
    fn trace(&self, py: Python<'_>, step: Option<usize>) -> PyResult<f64> {
        self.read(py, |inner| inner.trace(step))
    }

    fn merge(&self, py: Python<'_>, other: &Bound<'_, Self>) -> PyResult<()> {
        let theirs = other.get();
        if std::ptr::eq(self, theirs) {
            return self
                .read(py, |inner| Ok(inner.clone()))
                .and_then(|copy| run(py, None, |_| self.lock().merge(&copy)));
        }
        // Both are locked in the order of their addresses, so that two merges in opposite directions cannot wait
        // for each other.
        run(py, None, |_| {
            if std::ptr::from_ref(self) < std::ptr::from_ref(theirs) {
                let mut mine = self.lock();
                mine.merge(&theirs.lock())
            } else {
                let theirs = theirs.lock();
                self.lock().merge(&theirs)
            }
        })
    }

    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = run(py, None, |_| self.lock().state())?;
        let out = PyDict::new(py);
        out.set_item("spec_version", state.spec_version)?;
        out.set_item("dim", state.dim)?;
        out.set_item("steps", state.steps)?;
        out.set_item("per_step", state.per_step)?;
        out.set_item("n_rows", state.n_rows)?;
        let (hi, lo) = (PyList::empty(py), PyList::empty(py));
        for matrix in state.matrices {
            hi.append(PyArray1::from_vec(py, matrix.hi))?;
            lo.append(PyArray1::from_vec(py, matrix.lo))?;
        }
        out.set_item("hi", hi)?;
        out.set_item("lo", lo)?;
        Ok(out)
    }

    #[staticmethod]
    #[pyo3(signature = (state, *, threads = 0))]
    fn from_state(py: Python<'_>, state: &Bound<'_, PyDict>, threads: usize) -> PyResult<Self> {
        let item = |name: &str| {
            state.get_item(name)?.ok_or_else(|| PyKeyError::new_err(format!("Hessian state has no {name:?}")))
        };
        let limbs = |name: &str| -> PyResult<Vec<Vec<i64>>> {
            let list: Vec<PyReadonlyArray1<'_, i64>> = item(name)?.extract()?;
            list.iter().map(|array| Ok(array.as_slice()?.to_vec())).collect()
        };
        let (hi, lo) = (limbs("hi")?, limbs("lo")?);
        if hi.len() != lo.len() {
            let reason = format!("{} high and {} low parts", hi.len(), lo.len());
            return Err(raise(py, &Error::BadState(reason)));
        }
        let state = State {
            spec_version: item("spec_version")?.extract()?,
            dim: item("dim")?.extract()?,
            steps: item("steps")?.extract()?,
            per_step: item("per_step")?.extract()?,
            n_rows: item("n_rows")?.extract()?,
            matrices: hi.into_iter().zip(lo).map(|(hi, lo)| MatrixState { hi, lo }).collect(),
        };
        Ok(Self::wrap(run(py, None, |_: &Watch| Accumulator::from_state(&state, threads))?))
    }
}

impl HessianAccumulator {
    fn add(&self, py: Python<'_>, step: usize, rows: Result<Rows<'_>, Error>) -> PyResult<()> {
        let rows = rows.map_err(|e| raise(py, &e))?;
        run(py, None, |watch| self.lock().update(step, rows, watch))
    }
}

fn isa_named(py: Python<'_>, name: Option<&str>) -> PyResult<Isa> {
    let Some(name) = name else {
        return Ok(Isa::best());
    };
    let all = Isa::available();
    all.iter().copied().find(|isa| isa.name() == name).ok_or_else(|| {
        let allowed = all.iter().map(|isa| format!("'{}'", isa.name())).collect::<Vec<_>>().join(", ");
        raise(py, &Error::Setting { name: "isa", got: format!("{name:?}"), allowed })
    })
}

/// Shorthand used by the other files: a matrix as a Python array.
pub(crate) fn matrix<'py, T: numpy::Element>(
    py: Python<'py>,
    values: Vec<T>,
    shape: [usize; 2],
) -> PyResult<Bound<'py, PyArray2<T>>> {
    PyArray1::from_vec(py, values).reshape(shape)
}
