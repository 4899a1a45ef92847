package remote

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"lookaside/tiers"
	"lookaside/tiers/tiertest"
)

const accessKey = "lookaside-test"

// s3Server starts a versitygw over a directory. Its bucket is "kv-cache".
func s3Server(t testing.TB, args ...string) (s *server, dir string) {
	t.Helper()
	path, err := filepath.Abs("../../.cache/tools/bin/versitygw")
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "kv-cache"), 0o700); err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", freePort(t))
	args = append([]string{"--port", addr, "--quiet", "--keep-alive"}, args...)
	s = launch(t, &server{path: path, addr: addr, args: append(args, "posix", dir),
		env: []string{"ROOT_ACCESS_KEY=" + accessKey, "ROOT_SECRET_KEY=" + password}})
	return s, dir
}

// credentialsFile is a file with the S3 server's credentials.
func credentialsFile(t testing.TB, key, secret string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "credentials")
	text := fmt.Sprintf("[other]\naws_access_key_id = x\n\n[default]\naws_access_key_id = %s\naws_secret_access_key = %s\n", key, secret)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// rotFiles changes the last byte of every object with a prefix.
func rotFiles(t testing.TB, dir string) func(prefix string) {
	return func(prefix string) {
		t.Helper()
		err := filepath.WalkDir(filepath.Join(dir, "kv-cache", prefix),
			func(path string, e fs.DirEntry, err error) error {
				if err != nil || e.IsDir() {
					return err
				}
				f, err := os.OpenFile(path, os.O_RDWR, 0)
				if err != nil {
					return err
				}
				defer f.Close()
				info, err := f.Stat()
				if err != nil {
					return err
				}
				b := make([]byte, 1)
				if _, err := f.ReadAt(b, info.Size()-1); err != nil {
					return err
				}
				_, err = f.WriteAt([]byte{b[0] ^ 1}, info.Size()-1)
				return err
			})
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestContractS3(t *testing.T) {
	t.Parallel()
	s, dir := s3Server(t)
	o := S3Options{DialTimeout: unhurried, Endpoint: "http://" + s.addr, Bucket: "kv-cache",
		CredentialsFile: credentialsFile(t, accessKey, password)}
	f := factory(func(prefix string) (*Tier, error) {
		o := o
		o.Prefix = prefix
		return OpenS3(o)
	}, rotFiles(t, dir), stalled(s))
	whole := f.New
	f.New = func(t testing.TB, mo tiertest.MediumOptions) *tiertest.Medium {
		m := whole(t, mo)
		if mo.FailNth == 0 {
			return m
		}
		o := o
		o.Prefix = fmt.Sprintf("faults%d", mo.FailNth)
		// There are too many to let each fail in turn; each kind does.
		o.Endpoint, m.Failed = failingProxy(t, s.addr, mo.FailNth*3)
		m.Open = func() (tiers.Tier, error) { return OpenS3(o) }
		return m
	}
	tiertest.Run(t, f)
}

// failingProxy is a server before another one. It lets the Nth request fail: without passing it on
// or, every other N, by losing the answer.
func failingProxy(t testing.TB, addr string, nth int64) (endpoint string, failed func() bool) {
	t.Helper()
	var n atomic.Int64
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "http", addr
			r.Out.Host = r.In.Host // it is signed
		},
		ErrorLog: log.New(io.Discard, "", 0),
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.Add(1) != nth {
			proxy.ServeHTTP(w, r)
			return
		}
		if nth%2 == 0 {
			proxy.ServeHTTP(httptest.NewRecorder(), r)
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(http.StatusServiceUnavailable)
	}))
	t.Cleanup(s.Close)
	return s.URL, func() bool { return n.Load() >= nth }
}

// Over TLS, with credentials of the environment and little room; and objects that were torn when
// they were written.
func TestS3TLS(t *testing.T) {
	files := certificates(t)
	s, dir := s3Server(t, "--cert", files.Cert, "--key", files.Key)
	t.Setenv("REMOTE_TEST_KEY", accessKey)
	t.Setenv("REMOTE_TEST_SECRET", password)
	tier, err := OpenS3(S3Options{DialTimeout: unhurried, Endpoint: "https://" + s.addr,
		Bucket: "kv-cache", Region: "us-east-1", Files: TLSFiles{CA: files.CA}, Pool: 2,
		AccessKeyEnv: "REMOTE_TEST_KEY", SecretKeyEnv: "REMOTE_TEST_SECRET"})
	if err != nil {
		t.Fatal(err)
	}
	defer tier.Close()
	if err := tier.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	space := tiertest.NewSpace("tls", geometry)
	var all []tiers.Transfer
	for i := range byte(20) {
		all = append(all, chunkOf(space, i, 2, 3, 4))
	}
	mustStore(t, tier, all...)
	for _, tr := range all {
		if err := load(t.Context(), tier, tr); err != nil {
			t.Error(err)
		}
	}
	length := int64(0)
	err = filepath.WalkDir(filepath.Join(dir, "kv-cache", "la1"), func(path string, e fs.DirEntry,
		err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		length += 1600 // of some 33 KiB
		return os.Truncate(path, length-1600)
	})
	if err != nil {
		t.Fatal(err)
	}
	for i, tr := range all {
		if err := load(t.Context(), tier, tr); !errors.Is(err, tiers.ErrNotFound) {
			t.Errorf("load of torn object %d: %v", i, err)
		}
	}
	if n, err := tier.Clear(t.Context(), space.Fingerprint); n > 0 || err != nil {
		t.Errorf("%d torn objects are left, %v", n, err)
	}
}
