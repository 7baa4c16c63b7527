//! The Hessian accumulator as a Python class.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use loopq_core::dump::{RowType, Rows};
use loopq_core::hessian::{Accumulator, MatrixState, Settings, State};
use loopq_core::simd::Isa;
use loopq_core::Error;
use numpy::{PyArray1, PyArray2};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::arrays::{matrix, vector, InputRows, Vector};
use crate::gil::{allow_threads, raise};

/// `X^T X` summed over rows, per step, reproducibly.
#[pyclass(frozen, module = "loopq._native")]
pub(crate) struct HessianAccumulator {
    inner: Mutex<Accumulator>,
    /// How many threads are at the lock, below the number of their process.
    users: AtomicU64,
}

/// The sums, while one thread has them. The lock is released before its thread is counted out.
struct Held<'a> {
    sums: MutexGuard<'a, Accumulator>,
    _leaving: Leaving<'a>,
}

struct Leaving<'a>(&'a AtomicU64);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Deref for Held<'_> {
    type Target = Accumulator;

    fn deref(&self) -> &Accumulator {
        &self.sums
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Accumulator {
        &mut self.sums
    }
}

impl HessianAccumulator {
    /// A forked child has the lock as it was, and no thread that would release it: what was in use then is broken there.
    fn lock(&self) -> Result<Held<'_>, Error> {
        let process = u64::from(std::process::id()) << 32;
        let enter = |users: u64| match users & u64::from(u32::MAX) {
            0 => Some(process + 1),
            _ if users & !u64::from(u32::MAX) == process => Some(users + 1),
            _ => None,
        };
        self.users.fetch_update(Ordering::Acquire, Ordering::Relaxed, enter).map_err(|_| Error::Broken)?;
        let leaving = Leaving(&self.users);
        Ok(Held { sums: self.inner.lock().unwrap_or_else(PoisonError::into_inner), _leaving: leaving })
    }

    /// Short reads on the caller's thread.
    fn read<T: Send>(
        &self,
        py: Python<'_>,
        f: impl FnOnce(&Accumulator) -> Result<T, Error> + Send,
    ) -> PyResult<T> {
        py.detach(|| f(&*self.lock()?)).map_err(|e| raise(py, &e))
    }

    fn wrap(inner: Accumulator) -> Self {
        Self { inner: Mutex::new(inner), users: AtomicU64::new(0) }
    }
}

#[pymethods]
impl HessianAccumulator {
    #[new]
    #[pyo3(signature = (dim, steps, *, per_step, threads = 0))]
    fn new(py: Python<'_>, dim: usize, steps: Vec<usize>, per_step: bool, threads: usize) -> PyResult<Self> {
        let settings = Settings { dim, steps, per_step, threads, isa: Isa::best() };
        Ok(Self::wrap(allow_threads(py, |_| Accumulator::new(settings))?))
    }

    fn update(&self, py: Python<'_>, step: usize, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = InputRows::take(rows)?;
        let [n, dim] = rows.shape();
        let view = match &rows {
            InputRows::F32(rows) => Rows::from_f32(rows.values()?, n, dim),
            InputRows::F16(rows) => Rows::from_f16(rows.values()?, n, dim),
            InputRows::Bf16(rows) => Rows::from_bits16(rows.values()?, RowType::Bf16, n, dim),
        };
        let view = view.map_err(|e| raise(py, &e))?;
        allow_threads(py, |cancel| self.lock()?.update(step, view, cancel))
    }

    /// The file must not change during the call, as the stub says.
    #[allow(unsafe_code)] // the file is mapped
    fn update_file(&self, py: Python<'_>, step: usize, path: PathBuf, tensor: &str) -> PyResult<()> {
        // SAFETY: files of a dump are complete before they get their names and are never written in place; for any other file
        // the caller in Python has been told.
        allow_threads(py, |cancel| unsafe { self.lock()?.update_file(step, &path, tensor, cancel) })
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

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        allow_threads(py, |cancel| self.lock()?.finish(cancel))
    }

    #[pyo3(signature = (steps = None, *, weights = None))]
    fn matrix<'py>(
        &self,
        py: Python<'py>,
        steps: Option<Vec<usize>>,
        weights: Option<Vec<f64>>,
    ) -> PyResult<Bound<'py, PyArray2<f64>>> {
        let steps = steps.as_deref();
        let (dim, values) = allow_threads(py, |cancel| {
            let inner = self.lock()?;
            let values = match &weights {
                None => inner.matrix(steps, cancel)?,
                Some(weights) => inner.weighted(steps, weights, cancel)?,
            };
            Ok((inner.settings().dim, values))
        })?;
        matrix(py, values, [dim, dim])
    }

    #[pyo3(signature = (steps = None))]
    fn diagonal<'py>(
        &self,
        py: Python<'py>,
        steps: Option<Vec<usize>>,
    ) -> PyResult<Bound<'py, PyArray1<f64>>> {
        vector(py, self.read(py, |inner| inner.diagonal(steps.as_deref()))?)
    }

    #[pyo3(signature = (step = None))]
    fn trace(&self, py: Python<'_>, step: Option<usize>) -> PyResult<f64> {
        self.read(py, |inner| inner.trace(step))
    }

    fn merge(&self, py: Python<'_>, other: &Bound<'_, Self>) -> PyResult<()> {
        let theirs = other.get();
        if std::ptr::eq(self, theirs) {
            let allowed = "another accumulator: with its own sums every row would count twice".to_string();
            let got = "the accumulator itself".to_string();
            return Err(raise(py, &Error::Setting { name: "other", got, allowed }));
        }
        // Both are locked in the order of their addresses, so that two merges in opposite directions cannot wait
        // for each other.
        allow_threads(py, |cancel| {
            if std::ptr::from_ref(self) < std::ptr::from_ref(theirs) {
                let mut mine = self.lock()?;
                mine.merge(&*theirs.lock()?, cancel)
            } else {
                let theirs = theirs.lock()?;
                self.lock()?.merge(&theirs, cancel)
            }
        })
    }

    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let state = allow_threads(py, |cancel| self.lock()?.state(cancel))?;
        let out = PyDict::new(py);
        out.set_item("spec_version", state.spec_version)?;
        out.set_item("dim", state.dim)?;
        out.set_item("steps", state.steps)?;
        out.set_item("per_step", state.per_step)?;
        out.set_item("n_rows", state.n_rows)?;
        let (hi, lo) = (PyList::empty(py), PyList::empty(py));
        for matrix in state.matrices {
            hi.append(vector(py, matrix.hi.into_owned())?)?;
            lo.append(vector(py, matrix.lo.into_owned())?)?;
        }
        out.set_item("hi", hi)?;
        out.set_item("lo", lo)?;
        Ok(out)
    }

    #[staticmethod]
    #[pyo3(signature = (state, *, threads = 0))]
    fn from_state(py: Python<'_>, state: &Bound<'_, PyDict>, threads: usize) -> PyResult<Self> {
        let item = |name: &str| {
            state.get_item(name)?.ok_or_else(|| raise(py, &Error::BadState(format!("it has no {name:?}"))))
        };
        let limbs = |name: &str| -> PyResult<Vec<Vector<'_, i64>>> {
            let list: Vec<Bound<'_, PyAny>> = item(name)?.extract()?;
            list.iter().map(|array| Vector::take(name, array)).collect()
        };
        let (hi, lo) = (limbs("hi")?, limbs("lo")?);
        if hi.len() != lo.len() {
            let reason = format!("{} high and {} low parts", hi.len(), lo.len());
            return Err(raise(py, &Error::BadState(reason)));
        }
        let matrices = hi
            .iter()
            .zip(&lo)
            .map(|(hi, lo)| Ok(MatrixState { hi: hi.values()?.into(), lo: lo.values()?.into() }));
        let state = State {
            spec_version: item("spec_version")?.extract()?,
            dim: item("dim")?.extract()?,
            steps: item("steps")?.extract()?,
            per_step: item("per_step")?.extract()?,
            n_rows: item("n_rows")?.extract()?,
            matrices: matrices.collect::<PyResult<_>>()?,
        };
        Ok(Self::wrap(allow_threads(py, |cancel| Accumulator::from_state(&state, threads, cancel))?))
    }
}
