// Package deploy holds no code: its tests read the manifests with the types of
// the Kubernetes API.
package deploy

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// read decodes the documents of daemonset.yaml, refusing fields that the API does
// not know.
func read(t *testing.T) (corev1.Namespace, appsv1.DaemonSet) {
	t.Helper()
	b, err := os.ReadFile("daemonset.yaml")
	if err != nil {
		t.Fatal(err)
	}
	docs := bytes.Split(b, []byte("\n---\n"))
	if len(docs) != 2 {
		t.Fatalf("%d documents", len(docs))
	}
	var ns corev1.Namespace
	var ds appsv1.DaemonSet
	if err := yaml.UnmarshalStrict(docs[0], &ns); err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict(docs[1], &ds); err != nil {
		t.Fatal(err)
	}
	return ns, ds
}

func TestTheDaemonSetMountsSocketHostsAndOptionalSecrets(t *testing.T) {
	ns, ds := read(t)
	pod := ds.Spec.Template
	if ds.Namespace != ns.Name || ds.Spec.Selector.MatchLabels["app.kubernetes.io/name"] != pod.Labels["app.kubernetes.io/name"] {
		t.Error("namespace or selector do not fit")
	}
	if len(pod.Spec.Containers) != 1 {
		t.Fatalf("%d containers", len(pod.Spec.Containers))
	}
	mounts := map[string]corev1.VolumeMount{}
	for _, m := range pod.Spec.Containers[0].VolumeMounts {
		mounts[m.Name] = m
	}
	paths, secrets := map[string]bool{}, 0
	for _, v := range pod.Spec.Volumes {
		m, ok := mounts[v.Name]
		if !ok {
			t.Errorf("volume %s is not mounted", v.Name)
		}
		switch {
		case v.HostPath != nil:
			paths[v.HostPath.Path] = true
			if m.MountPath != v.HostPath.Path {
				t.Errorf("%s is mounted at %s: kip is told the node's own paths", v.HostPath.Path, m.MountPath)
			}
		case v.Secret != nil:
			secrets++
			if v.Secret.Optional == nil || !*v.Secret.Optional || !m.ReadOnly {
				t.Errorf("secret %s must be optional and read-only", v.Secret.SecretName)
			}
			if m.MountPath != "/mnt/secrets/"+v.Secret.SecretName || m.SubPath != "" {
				t.Errorf("secret %s is mounted at %s: kip takes the folder's name for the secret's, and a subPath is never updated", v.Secret.SecretName, m.MountPath)
			}
		}
	}
	if !paths["/run/containerd/containerd.sock"] || !paths["/etc/containerd/certs.d"] || secrets != 2 {
		t.Errorf("host paths %v, %d secrets", paths, secrets)
	}
}

func TestTheDaemonSetGivesUpWhatItDoesNotNeed(t *testing.T) {
	_, ds := read(t)
	pod := ds.Spec.Template.Spec
	c := pod.Containers[0].SecurityContext
	p := pod.SecurityContext
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("it mounts a token for the Kubernetes API")
	}
	if pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Error("it shares a namespace with the node")
	}
	if p.RunAsNonRoot == nil || !*p.RunAsNonRoot || *p.RunAsUser != 65532 || *p.RunAsGroup != 0 || p.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("pod security context %+v", p)
	}
	if *c.AllowPrivilegeEscalation || !*c.ReadOnlyRootFilesystem || c.Privileged != nil || strings.Join(capabilities(c), ",") != "ALL" {
		t.Errorf("container security context %+v", c)
	}
}

func TestTheImageIsAStaticBinaryThatIsNotRoot(t *testing.T) {
	b, err := os.ReadFile("../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	stages := strings.Split(string(b), "\nFROM ")
	last := "FROM " + stages[len(stages)-1]
	for _, want := range []string{"FROM scratch\n", "USER 65532:0\n", `ENTRYPOINT ["/kip"]`} {
		if !strings.Contains(last, want) {
			t.Errorf("no %q in the final stage:\n%s", want, last)
		}
	}
	path := filepath.Join(t.TempDir(), "kip")
	build := exec.Command("go", "build", "-trimpath", "-o", path, "../cmd/kip")
	build.Env = append(os.Environ(), "CGO_ENABLED=0") // as make build has it, which the Dockerfile calls
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			t.Error("the binary needs a dynamic linker, which scratch does not have")
		}
	}
}

func capabilities(c *corev1.SecurityContext) []string {
	var dropped []string
	for _, d := range c.Capabilities.Drop {
		dropped = append(dropped, string(d))
	}
	return dropped
}
