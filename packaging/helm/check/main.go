// Check reads Kubernetes manifests from standard input and checks each: it must decode into the
// API's type without unknown fields, and its pods must fit a level of Pod Security.
package main

import (
	"bufio"
	"bytes"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

func main() {
	pods := flag.Int("pods", 1, "how many pods or pod templates there must be")
	level := flag.String("level", string(api.LevelRestricted), "which `level` the pods must fit")
	flag.Parse()
	if err := check(os.Stdin, os.Stdout, *pods, api.Level(*level)); err != nil {
		fmt.Fprintln(os.Stderr, "check:", err)
		os.Exit(1)
	}
}

// check reports each object to out. It fails if one is wrong.
func check(in io.Reader, out io.Writer, pods int, level api.Level) error {
	types := runtime.NewScheme()
	if err := errors.Join(scheme.AddToScheme(types), monitoring.AddToScheme(types)); err != nil {
		return err
	}
	decoder := serializer.NewCodecFactory(types, serializer.EnableStrict).UniversalDeserializer()
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return err
	}
	wanted := api.LevelVersion{Level: level, Version: api.LatestVersion()}
	var errs []error
	documents := yaml.NewYAMLReader(bufio.NewReader(in))
	found := 0
	for {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return err
		}
		if empty(text) {
			continue
		}
		object, kind, err := decoder.Decode(text, nil, nil)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		name := "?"
		if m, ok := object.(meta.Object); ok {
			name = m.GetName()
		}
		what := "ok"
		if m, spec := podOf(object); spec != nil {
			found++
			verdict := policy.AggregateCheckResults(evaluator.EvaluatePod(wanted, m, spec))
			if what = "ok, " + string(level); !verdict.Allowed {
				what = "not " + string(level)
				errs = append(errs, fmt.Errorf("%s %s: %s", kind.Kind, name,
					verdict.ForbiddenDetail()))
			}
		}
		fmt.Fprintf(out, "%s %s: %s\n", kind.Kind, name, what)
	}
	if found != pods {
		errs = append(errs, fmt.Errorf("%d pods, want %d", found, pods))
	}
	return errors.Join(errs...)
}

// podOf returns the pod that an object is or makes, or nil.
func podOf(object runtime.Object) (*meta.ObjectMeta, *core.PodSpec) {
	switch o := object.(type) {
	case *core.Pod:
		return &o.ObjectMeta, &o.Spec
	case *apps.Deployment:
		return &o.Spec.Template.ObjectMeta, &o.Spec.Template.Spec
	case *apps.StatefulSet:
		return &o.Spec.Template.ObjectMeta, &o.Spec.Template.Spec
	case *apps.DaemonSet:
		return &o.Spec.Template.ObjectMeta, &o.Spec.Template.Spec
	}
	return nil, nil
}

// empty reports whether a document has comments and white space only.
func empty(text []byte) bool {
	for line := range bytes.Lines(text) {
		if line = bytes.TrimSpace(line); len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}
